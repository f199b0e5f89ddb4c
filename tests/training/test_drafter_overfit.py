"""What the Markov head is for: blocks without it guess a Markov chain blindly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.draft import smoke_drafter_config
from deepinfer_jax.training.drafter_blocks import Targets
from deepinfer_jax.training.drafter_forward import DrafterOptions
from deepinfer_jax.training.drafter_losses import metrics
from deepinfer_jax.training.drafter_step import DrafterSettings, begin, train_step

V, G, ROWS, T = 16, 3, 4, 32
CONFIG = dataclasses.replace(
    smoke_drafter_config(),
    vocab_size=V,
    dspark_block_size=G,
    dspark_target_layer_ids=(0,),
)
SETTINGS = DrafterSettings(steps=200, lr=1e-2, anchors=16)


def chain() -> tuple[dict[str, jnp.ndarray], np.ndarray, np.ndarray]:
    """A frozen head, the hidden state after each token, and the transitions that follow."""
    rng = np.random.default_rng(0)
    head = rng.normal(0, 1, (V, CONFIG.hidden_size)).astype(np.float32)
    states = rng.normal(0, 0.5, (V, CONFIG.hidden_size)).astype(np.float32)
    logits = states @ head.T
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    frozen = {"embed.weight": jnp.asarray(states), "head.weight": jnp.asarray(head)}
    return frozen, states, odds / odds.sum(-1, keepdims=True)


def batch(rng: np.random.Generator, states: np.ndarray, odds: np.ndarray) -> dict[str, np.ndarray]:
    ids = np.zeros((ROWS, T), np.int32)
    ids[:, 0] = rng.integers(0, V, ROWS)
    for t in range(1, T):
        cumulative = np.cumsum(odds[ids[:, t - 1]], axis=-1)
        ids[:, t] = np.minimum((rng.random((ROWS, 1)) > cumulative).sum(-1), V - 1)
    ones = np.ones((ROWS, T), np.int32)
    hidden = states[ids]
    return {"ids": ids, "segment": ones, "mask": ones > 0, "taps": hidden, "hidden": hidden}


def trained(method: str) -> tuple[dict[str, float], dict[str, float]]:
    """Training metrics of the first and the last thirty steps."""
    frozen, states, odds = chain()
    rng, state = np.random.default_rng(1), begin(method, CONFIG, SETTINGS)
    options = DrafterOptions(heads=method == "dspark")
    step = train_step(method, CONFIG, SETTINGS, options, lambda _, batch: Targets(**batch))
    first = jax.tree.map(jnp.asarray, batch(rng, states, odds))
    compiled = step.lower(state, frozen, first).compile(
        compiler_options={"xla_backend_optimization_level": 0}
    )
    reports = []
    for _ in range(SETTINGS.steps):
        state, report = compiled(state, frozen, jax.tree.map(jnp.asarray, batch(rng, states, odds)))
        reports.append(report)
    sums = ("slots", "accepted", "survives", "error", "bias", "cumprod_bias")
    parts = (reports[:30], reports[-30:])
    return tuple(
        metrics({n: np.sum([r[n] for r in part], axis=0) for n in sums if n in part[0]})
        for part in parts
    )


@pytest.fixture(scope="module")
def dspark():
    return trained("dspark")


def test_the_markov_head_takes_acceptance_towards_the_whole_block(dspark):
    _, plain = trained("dflash")
    before, after = dspark
    assert after["tau_probabilistic"] > before["tau_probabilistic"] + 1
    assert after["tau_probabilistic"] > plain["tau_probabilistic"] + 0.5
    assert after["tau_probabilistic"] > G + 1 - 0.5


def test_the_confidence_loses_its_bias(dspark):
    before, after = dspark
    assert before["confidence_abs_error"] > 0.1
    assert after["confidence_abs_error"] < 0.03
    assert abs(after["confidence_bias"]) < 0.01
    assert abs(after["confidence_cumprod_bias"]) < 0.01
