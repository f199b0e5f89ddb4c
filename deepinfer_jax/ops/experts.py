"""`experts(x, weights, ids, gates, ...) -> y`: the routed experts' part of a mixture layer.

x [n, d], ids int32 [n, k], gates float32 [n, k], weights w1, w3 [e, f, d] and w2 [e, d, f];
y float32 [n, d] = sum over a row's k experts of w2 (gate * silu(min(w1 x, L)) * clip(w3 x, -L, L)).
An id that names no expert adds nothing; no other is ever dropped (model specification, "MoE").
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.packed import Weight
from deepinfer_jax.ops.rowwise import TILE

Linear = Callable[..., jax.Array]

# Rows of one expert's block in `sorted_blocks`, for few and for many rows; part of the numerics.
FEW_ROWS, MANY_ROWS, MANY = 8, 32, 128


@flax.struct.dataclass
class ExpertWeights:
    """Stacked experts: w1, w3 [e, f, d] and w2 [e, d, f]."""

    w1: Weight
    w3: Weight
    w2: Weight


def expert(
    x: jax.Array,
    weights: ExpertWeights,
    gates: jax.Array | None,
    *,
    linear: Linear,
    limit: float,
    quantize: bool,
) -> jax.Array:
    """One expert (unstacked weights) on x [n, d] with gates [n] or none; float32 [n, d].

    The gate half is clamped from above only, and before the activation.
    """
    gate = linear(x, weights.w1, quantize=quantize).astype(jnp.float32)
    up = linear(x, weights.w3, quantize=quantize).astype(jnp.float32)
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    if gates is not None:
        hidden = hidden * gates[:, None]
    return linear(hidden.astype(x.dtype), weights.w2, quantize=quantize).astype(jnp.float32)


def all_rows(
    x: jax.Array,
    weights: ExpertWeights,
    ids: jax.Array,
    gates: jax.Array,
    *,
    linear: Linear,
    limit: float,
    quantize: bool,
) -> jax.Array:
    """Every expert on every row, from first to last, with gate 0 where not chosen; reference."""

    def add(total: jax.Array, step: tuple[jax.Array, ExpertWeights]) -> tuple[jax.Array, None]:
        e, one = step
        chosen = ids == e
        gate = jnp.sum(jnp.where(chosen, gates, 0.0), -1)
        y = expert(x, one, gate, linear=linear, limit=limit, quantize=quantize)
        return total + jnp.where(chosen.any(-1)[:, None], y, 0.0), None

    count = jax.tree.leaves(weights)[0].shape[0]
    total, _ = jax.lax.scan(
        add, jnp.zeros(x.shape, jnp.float32), (jnp.arange(count, dtype=jnp.int32), weights)
    )
    return total


def sorted_blocks(
    x: jax.Array,
    weights: ExpertWeights,
    ids: jax.Array,
    gates: jax.Array,
    *,
    linear: Linear,
    limit: float,
    quantize: bool,
) -> jax.Array:
    """Rows sorted by expert, each expert's rows padded to whole blocks, one block at a time.

    The work grows with n k and the experts in use, not with all experts.
    """
    size = MANY_ROWS if ids.shape[0] >= MANY else FEW_ROWS
    common = {"linear": linear, "limit": limit, "quantize": quantize}
    return _in_blocks(x, weights, ids, gates, size, **common).sum(1)


def row_tiles(
    x: jax.Array,
    weights: ExpertWeights,
    ids: jax.Array,
    gates: jax.Array,
    *,
    linear: Linear,
    limit: float,
    quantize: bool,
) -> jax.Array:
    """As `sorted_blocks` in blocks of one size, each row's experts added in the order of `ids`."""
    common = {"linear": linear, "limit": limit, "quantize": quantize}
    parts = _in_blocks(x, weights, ids, gates, TILE, **common)
    total = parts[:, 0]
    for i in range(1, ids.shape[1]):
        total = total + parts[:, i]
    return total


def _in_blocks(
    x: jax.Array,
    weights: ExpertWeights,
    ids: jax.Array,
    gates: jax.Array,
    size: int,
    *,
    linear: Linear,
    limit: float,
    quantize: bool,
) -> jax.Array:
    """What each of a row's experts gives it, float32 [n, k, d]; `size` rows of one at a time."""
    n, k = ids.shape
    count = jax.tree.leaves(weights)[0].shape[0]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    load = jnp.zeros(count, jnp.int32).at[flat].add(1)
    blocks = (load + size - 1) // size
    first_block = jnp.cumsum(blocks) - blocks
    first_row = jnp.cumsum(load) - load
    # No more blocks than this can exist: full ones, plus one partial block per expert in use.
    most = (n * k) // size + min(count, n * k)
    # Few experts against few blocks: one comparison of all is faster than a search by halves.
    owner = jnp.searchsorted(
        first_block + blocks, jnp.arange(most), side="right", method="compare_all"
    ).astype(jnp.int32)

    def run(block: jax.Array, out: jax.Array) -> jax.Array:
        e = owner[block]
        within = (block - first_block[e]) * size + jnp.arange(size, dtype=jnp.int32)
        live = within < load[e]
        place = jnp.where(live, order[jnp.minimum(first_row[e] + within, n * k - 1)], n * k)
        row = jnp.minimum(place // k, n - 1)
        gate = jnp.where(live, gates.reshape(-1)[jnp.minimum(place, n * k - 1)], 0.0)
        one = jax.tree.map(lambda w: w[e], weights)
        y = expert(x[row], one, gate, linear=linear, limit=limit, quantize=quantize)
        return out.at[place].set(y, mode="drop")

    parts = jnp.zeros((n * k, x.shape[-1]), jnp.float32)
    parts = jax.lax.fori_loop(0, blocks.sum(), run, parts)
    return parts.reshape(n, k, -1)


KERNELS = (
    Kernel("experts", "sorted_blocks", sorted_blocks),
    Kernel("experts", "row_tiles", row_tiles, on=frozenset({"cpu"}), batch_invariant=True),
    Kernel("experts", "all_rows", all_rows),
)
