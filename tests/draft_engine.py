"""Engines with a single program, on a three-layer network whose drafter is often right.

A test waits for every program, so such an engine has one that holds prompts and drafts alike.
"""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from short_engine import SLOTS
from short_llm import Weights, short_config, write_short_model

from deepinfer_jax import LLM, SamplingParams
from deepinfer_jax.engine import engine as engine_module
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.engine.varlen import Lengths
from deepinfer_jax.model.cache import PAGE, pages_of
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.step import StepOptions
from deepinfer_jax.sampling.lengths import CostTable
from deepinfer_jax.text.output import PlainText

LONGEST = 384


def guessable(weights: Weights) -> None:
    """The next token follows mostly from the last one, and the Markov head knows how."""
    for name in weights:
        if name.startswith("layers.") and name.endswith(("wo_b.weight", "w2.weight")):
            weights[name] *= 0.2
    embed = weights["embed.weight"]
    weights["mtp.0.norm.weight"] *= 0.2  # what the block itself says is little
    weights["mtp.0.markov_head.embed.weight"] = embed / np.sqrt(np.mean(embed**2, -1))[:, None]
    weights["mtp.0.markov_head.head.weight"] = weights["head.weight"] * weights["norm.weight"]


def write_guessable_model(folder: Path) -> Path:
    """A layer of each ratio, the middle one with an Engram."""
    raw = short_config(
        num_hidden_layers=3,
        num_nextn_predict_layers=1,
        compress_ratios=[0, 2, 1, 0],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=2,
        engram_layer_ids=[1],
        engram_num_embeddings=[630],
        dspark_target_layer_ids=[0, 1, 2],
    )
    raw["dspark_markov_rank"] = raw["hidden_size"]
    return write_short_model(folder, raw, drafter=True, change=guessable)


def engine_with(
    llm: LLM, drafts: int, *, rule: str = "coupled", varlen: bool = False, overlap: bool = True
) -> Engine:
    """An engine on `llm`'s network with `drafts` of each of 4 sequences verified in a step.

    With `varlen` a step is taken to cost more with every row, so that not all are.
    """
    net, most = llm.assembled, SLOTS * (1 + drafts)
    rows, table = most + 4, pages_of(LONGEST)
    limits = Limits(
        slots=SLOTS,
        rows=rows,
        pages=1 + SLOTS * table,
        max_model_len=LONGEST,
        table_pages=table,
        updates=SLOTS + 1 + table,
        look_back=4,
        drafts=drafts,
    )
    options: Any = dict(verification=rule, varlen=varlen, confidence_temperature=(1.0,) * drafts)
    with pytest.MonkeyPatch.context() as patch:
        only = Bucket(rows, rows, SLOTS, limits.updates, drafts)
        patch.setattr(engine_module, "plan_buckets", lambda *_, **__: (only,))
        made = Engine(
            net.network,
            net.params,
            net.mesh,
            limits=limits,
            options=StepOptions(**options),
            overlap=overlap,
        )
    if varlen:
        made._lengths = lengths_with(drafts)
    return made


def lengths_with(
    drafts: int, start: float = 8.0, more: float = 1.0, drafting: float = 0.0
) -> Lengths:
    """Lengths for steps that take `start` ms and `more` a row, of which `drafting` is a part."""
    costs = CostTable.of((n, start + more * n) for n in range(1, SLOTS * (1 + drafts) + 1))
    return Lengths(SLOTS, drafts, {SLOTS: StepTimes(costs, drafting)})


def sequences(
    llm: LLM, prompts: list[list[int]], tokens: int, temperature: float, seed: int = 1000
) -> list[Sequence]:
    """One for each prompt; the seed of a later one is greater by one."""
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    return [
        Sequence(i, 0, np.asarray(prompt, np.int32), params, seed + i, PlainText(llm.tokenizer, ()))
        for i, prompt in enumerate(prompts)
    ]


def state_of(engine: Engine) -> Any:
    """What the device holds."""
    return engine._run(lambda state: (state, jax.device_get(state))).result()


def committed(config: Any, state: Any, slot: int) -> tuple[int, str, str]:
    """Length of a slot, and digests of all that the caches hold of its committed positions.

    The second is of the draft rings.
    """
    cache, length = state.cache, int(state.length[slot])
    window = np.arange(max(0, length - config.sliding_window), length)
    back = np.arange(length - config.engram_max_ngram_size + 1, length)
    parts = [
        cache.window[:, slot, window % cache.window.shape[2]],
        cache.history[slot, back % cache.history.shape[1]],
    ]
    for source in cache.sources:
        entry = np.arange(length * source.entries.shape[1] // PAGE)
        page, place = np.divmod(entry, source.entries.shape[1])
        at = cache.table[slot, page], place
        parts += [source.entries[at], source.index_keys[at]]
        if source.raw is not None:
            parts.append(source.raw[slot, (length - 1) % source.raw.shape[1]])
    drafter = [] if cache.draft is None else [cache.draft[:, slot, window % cache.draft.shape[2]]]
    return length, _digest(parts), _digest(drafter)


def _digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a) for a in arrays)).hexdigest()
