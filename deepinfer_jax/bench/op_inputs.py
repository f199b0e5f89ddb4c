"""Inputs for one call of every op of the kernel table, at the sizes of a network.

Up to 16 rows are the next tokens of as many sequences, more rows are a prompt of one sequence.
Every row sees a context of 1,024 positions, in float32 with weights that lie as an engine holds
them on a CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.cache import PAGE
from deepinfer_jax.model.layers import rms_norm
from deepinfer_jax.ops.experts import ExpertWeights
from deepinfer_jax.ops.packed import Turned
from deepinfer_jax.ops.sparse_mla import Keys
from deepinfer_jax.ops.table import Ops

CONTEXT, SEQUENCES = 1024, 16


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        run: (kernels, given) -> result.
        given: a tree of arrays.
    """

    run: Callable[[Ops, Any], Any]
    given: Any


def _normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def _turned(seed: int, *shape: int) -> Turned:
    *lead, o, i = shape
    return Turned(_normal(seed, *lead, i, o) * jnp.float32(i**-0.5))


def _slots(rows: int) -> np.ndarray:
    """The sequence of each row."""
    several = np.arange(rows, dtype=np.int32)
    return several if rows <= SEQUENCES else np.zeros(rows, np.int32)


def _positions(rows: int) -> np.ndarray:
    """The position of each row: the last of its context, or of a prompt one after the other."""
    last = np.full(rows, CONTEXT - 1, np.int32)
    return last if rows <= SEQUENCES else np.arange(rows, dtype=np.int32) + np.int32(CONTEXT - rows)


def _rowwise(config: ModelConfig, rows: int) -> Call:
    eps = config.rms_norm_eps
    given = _normal(0, rows, config.hidden_size), _normal(1, config.hidden_size)
    return Call(lambda ops, g: ops.rowwise(lambda x: rms_norm(x, g[1], eps), g[0]), given)


def _mhc(config: ModelConfig, rows: int) -> Call:
    s, d = config.hc_mult, config.hidden_size
    iters, eps = config.hc_sinkhorn_iters, config.hc_eps
    base, scale = _normal(2, s * (s + 2)), jnp.ones(3, jnp.float32)
    given = _normal(0, rows, s, d), _normal(1, s * (s + 2), s * d), base, scale
    return Call(lambda ops, g: ops.mhc(*g, iters=iters, eps=eps), given)


def _linear(config: ModelConfig, rows: int) -> Call:
    out = config.num_attention_heads * config.head_dim
    given = _normal(0, rows, config.q_lora_rank), _turned(1, out, config.q_lora_rank)
    return Call(lambda ops, g: ops.linear(*g), given)


def _index_scores(config: ModelConfig, rows: int) -> Call:
    heads, width = config.index_n_heads, config.index_head_dim
    pages = CONTEXT // PAGE
    numbers = np.arange(SEQUENCES * pages, dtype=np.int32).reshape(SEQUENCES, pages)
    given = (
        _normal(0, rows, heads, width),
        _normal(1, rows, heads),
        _normal(2, SEQUENCES * pages, PAGE, width),
        numbers,
        _slots(rows),
        _positions(rows) + np.int32(1),
    )
    return Call(lambda ops, g: ops.index_scores(*g), given)


def _topk(config: ModelConfig, rows: int) -> Call:
    k = config.index_topk
    return Call(lambda ops, g: ops.topk(g, k=k), _normal(0, rows, CONTEXT))


def _sparse_mla(config: ModelConfig, rows: int) -> Call:
    heads, width, window = config.num_attention_heads, config.head_dim, config.sliding_window
    pool, rng = _normal(1, SEQUENCES * CONTEXT, width), np.random.default_rng(2)
    first = _slots(rows)[:, None] * np.int32(CONTEXT)
    near = _positions(rows)[:, None] - np.arange(window, dtype=np.int32)
    far = rng.integers(0, CONTEXT, (rows, config.index_topk), np.int32)
    seen = [near >= 0, np.ones(far.shape, bool)]
    at = [first + np.maximum(near, 0), first + far]
    given = _normal(0, rows, heads, width), pool, at, seen, _normal(3, heads)

    def run(ops: Ops, given: Any) -> Any:
        q, pool, at, seen, sink = given
        keys = [Keys(pool, *pair) for pair in zip(at, seen, strict=True)]
        return ops.sparse_mla(q, *keys, sink, scale=width**-0.5)

    return Call(run, given)


def _experts(config: ModelConfig, rows: int) -> Call:
    d, f, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    k, limit = config.num_experts_per_tok, config.swiglu_limit
    weights = ExpertWeights(_turned(1, e, f, d), _turned(2, e, f, d), _turned(3, e, d, f))
    chosen = np.argsort(np.random.default_rng(4).random((rows, e)))[:, :k].astype(np.int32)
    given = _normal(0, rows, d), weights, chosen, jnp.full((rows, k), 1 / k, jnp.float32)

    def run(ops: Ops, given: Any) -> Any:
        return ops.experts(*given, linear=ops.linear, limit=limit, quantize=False)

    return Call(run, given)


INPUTS: dict[str, Callable[[ModelConfig, int], Call]] = {
    "rowwise": _rowwise,
    "mhc": _mhc,
    "linear": _linear,
    "index_scores": _index_scores,
    "topk": _topk,
    "sparse_mla": _sparse_mla,
    "experts": _experts,
}
