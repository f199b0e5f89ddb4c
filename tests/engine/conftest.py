"""Engines on the short network, and sequences for them."""

import dataclasses

import numpy as np
import pytest
from short_engine import LIMITS

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.runner.compile import keep_compiled
from deepinfer_jax.text.output import PlainText


@pytest.fixture(scope="module")
def engine_of(llm, compiled):
    """Engines on the short network; their programs are those of the other tests' engine."""
    net, kept = llm.assembled, keep_compiled(compiled)

    def made(**options):
        limits = dataclasses.replace(LIMITS, **options.pop("limits", {}))
        return Engine(net.network, net.params, net.mesh, limits=limits, kept=kept, **options)

    return made


@pytest.fixture(scope="module")
def sequence_of(llm):
    def made(number, prompt, leader=None, index=0, **params):
        defaults = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True}
        return Sequence(
            request=number,
            index=index,
            prompt=np.asarray(prompt, np.int32),
            params=SamplingParams(**(defaults | params)),
            seed=1000 + number + 100 * index,
            text=PlainText(llm.tokenizer, ()),
            leader=leader,
        )

    return made


@pytest.fixture(scope="module")
def plain(engine_of):
    return engine_of(overlap=False)
