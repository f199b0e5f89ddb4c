"""`sparse_mla(q, window, entries, sink, scale=...) -> o`: attention of one row over chosen keys.

q [n, h, k]; two `Keys`, the window rows and the selected compressed entries; sink [h] float32;
o [n, h, k] in q's dtype. K is also V. Both sets and the sink, a logit with value zero, share one
softmax in float32; a row without any key gets zeros (model specification, "Attention").
"""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.quant import Decode, numbers
from deepinfer_jax.ops.rowwise import in_tiles

TILE = 32  # rows that `tiles` handles together; part of the numerics


@flax.struct.dataclass
class Keys:
    """Keys of every row, by reference into a pool.

    Attributes:
        pool: [m, stored k].
        at: int32 [n, c], rows of the pool.
        visible: bool [n, c]; what is not visible may point anywhere.
        decode: (stored rows, dtype) -> keys; only rows that were gathered are decoded.
    """

    pool: jax.Array
    at: jax.Array
    visible: jax.Array
    decode: Decode = flax.struct.field(pytree_node=False, default=numbers)


def _gather(keys: Keys, dtype: jnp.dtype) -> jax.Array:
    """Keys [n, c, k]; zero where hidden, since what is hidden may hold anything, NaN included."""
    rows = keys.decode(keys.pool.at[keys.at].get(mode="clip"), dtype)
    return jnp.where(keys.visible[..., None], rows, 0)


def _softmax(
    q: jax.Array,
    sets: list[tuple[jax.Array, jax.Array, str]],
    sink: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention over sets of (keys, visible [n, c], axes of the keys: `nck`, or `ck` if shared)."""
    scores = []
    for keys, visible, axes in sets:
        dots = jnp.einsum(
            f"nhk,{axes}->nhc", q, keys, precision="highest", preferred_element_type=jnp.float32
        )
        scores.append(jnp.where(visible[:, None], dots * scale, -jnp.inf))
    # The sink is a logit of its own, so the maximum is finite even for a row without keys.
    top = sink
    for part in scores:
        top = jnp.maximum(top, jnp.max(part, -1))
    total = jnp.exp(sink - top)
    out = jnp.zeros(q.shape, jnp.float32)
    for (keys, _, axes), part in zip(sets, scores, strict=True):
        weights = jnp.exp(part - top[..., None])
        total = total + jnp.sum(weights, -1)
        # In bfloat16 the weights are rounded before the value product, their sum is not.
        out = out + jnp.einsum(
            f"nhc,{axes}->nhk",
            weights.astype(q.dtype),
            keys,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
    return (out / total[..., None]).astype(q.dtype)


def xla(
    q: jax.Array, window: Keys, entries: Keys | None, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Gathers every row's keys; the plain reference."""
    some = [keys for keys in (window, entries) if keys is not None]
    sets = [(_gather(keys, q.dtype), keys.visible, "nck") for keys in some]
    return _softmax(q, sets, sink, scale)


def tiles(
    q: jax.Array, window: Keys, entries: Keys | None, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Tiles of rows: those of neighbouring positions (a prompt) gather their windows once.

    Neighbours are told by their references: row i + 1 sees what row i sees, one place further
    back, and one key more.
    """
    n, width = window.at.shape
    if n < TILE or width < TILE:
        return xla(q, window, entries, sink, scale=scale)
    count = -(-n // TILE)
    spare = count * TILE - n
    back = jnp.arange(width + TILE - 1)[None] - (TILE - 1 - jnp.arange(TILE)[:, None])

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, spare), *((0, 0) for _ in x.shape[1:])))
        return padded.reshape(count, TILE, *x.shape[1:])

    def one(tile: tuple[jax.Array, Keys, Keys | None]) -> jax.Array:
        q, near, far = tile
        own = [] if far is None else [(_gather(far, q.dtype), far.visible, "nck")]

        def shared() -> jax.Array:
            # Places of the last row, then those that only rows before it can see.
            rest = width - TILE + 1
            at = jnp.concatenate([near.at[-1], near.at[0, rest:]])
            seen = jnp.concatenate([near.visible[-1], near.visible[0, rest:]])
            keys = _gather(replace(near, at=at, visible=seen), q.dtype)
            inside = (back >= 0) & (back < width)
            visible = jnp.take_along_axis(near.visible, jnp.clip(back, 0, width - 1), 1) & inside
            return _softmax(q, [(keys, visible, "ck"), *own], sink, scale)

        def apart() -> jax.Array:
            return _softmax(q, [(_gather(near, q.dtype), near.visible, "nck"), *own], sink, scale)

        return jax.lax.cond(jnp.all(near.at[1:, 1:] == near.at[:-1, :-1]), shared, apart)

    def references(keys: Keys) -> tuple[jax.Array, jax.Array]:
        return cut(keys.at), cut(keys.visible)

    def run(step: tuple[jax.Array, tuple, tuple | None]) -> jax.Array:
        q, near, far = step
        chosen = None
        if far is not None and entries is not None:
            chosen = replace(entries, at=far[0], visible=far[1])
        return one((q, replace(window, at=near[0], visible=near[1]), chosen))

    far = None if entries is None else references(entries)
    out = jax.lax.map(run, (cut(q), references(window), far))
    return out.reshape(count * TILE, *q.shape[1:])[:n]


def each_row(
    q: jax.Array, window: Keys, entries: Keys | None, sink: jax.Array, *, scale: float
) -> jax.Array:
    """One row at a time, up to the last one that has a key."""
    sets = [keys for keys in (window, entries) if keys is not None]

    def one(row: tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]) -> jax.Array:
        q, references = row
        keys = [
            replace(keys, at=at, visible=visible)
            for keys, (at, visible) in zip(sets, references, strict=True)
        ]
        return xla(q, keys[0], keys[1] if len(keys) > 1 else None, sink, scale=scale)

    some = jnp.stack([keys.visible.any(-1) for keys in sets]).any(0)
    used = jnp.max(jnp.where(some, jnp.arange(1, q.shape[0] + 1, dtype=jnp.int32), 0))
    return in_tiles(one, (q, [(keys.at, keys.visible) for keys in sets]), used, size=1)


def window_only(
    q: jax.Array, window: Keys, entries: Keys | None, sink: jax.Array, *, scale: float
) -> jax.Array:
    """Hides the compressed entries: what a model can do without its long memory."""
    del entries
    return xla(q, window, None, sink, scale=scale)


# An ablation, not a kernel of the contract. It stands last, behind one that runs everywhere, and
# promises nothing, so it is used only where it is named.
WINDOW_ONLY = Kernel("sparse_mla", "window_only", window_only)
KERNELS = (
    Kernel("sparse_mla", "tiles", tiles),
    Kernel("sparse_mla", "each_row", each_row, on=frozenset({"cpu"}), batch_invariant=True),
    Kernel("sparse_mla", "xla", xla),
    WINDOW_ONLY,
)
