"""`index_scores(q, w, keys, table, slot, visible)`: how much a row wants each compressed entry.

q [n, h, k], w [n, h], keys [pages, c, stored k], table int32 [slots, p] of page numbers, slot and
visible int32 [n]; scores float32 [n, p c] = sum_h w[h] max(q[h] . key, 0) for the first `visible`
entries of the row's sequence, whose pages the table lists in order; what stands in the other
columns is not defined. `decode` gives the keys of the pages that are read. `round_scores` rounds
each head's dot and the sum to bfloat16, as the published forward does (model specification,
"Indexer").
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.quant import Decode, numbers
from deepinfer_jax.ops.rowwise import in_tiles

BLOCK = 512  # entries scored at a time; those that no row of a tile can see are left out
TILE = 32  # rows that `tiles` scores together when they are of one slot


def _scores(q: jax.Array, w: jax.Array, keys: jax.Array, round_scores: bool) -> jax.Array:
    """q [t, h, k], w [t, h], keys [m, k] -> float32 [t, m]."""
    dots = jnp.einsum(
        "thk,mk->thm", q, keys, precision="highest", preferred_element_type=jnp.float32
    )
    if round_scores:
        scores = jnp.einsum(
            "thm,th->tm",
            jax.nn.relu(dots.astype(jnp.bfloat16)),
            w.astype(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        return scores.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.sum(jax.nn.relu(dots) * w.astype(jnp.float32)[..., None], 1)


def _one_slot(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    pages: jax.Array,
    visible: jax.Array,
    rounded: bool,
    decode: Decode,
) -> jax.Array:
    """Rows of one sequence against its pages, block by block up to the last entry any can see."""
    _, c, stored = keys.shape
    some = max(min(BLOCK // c, pages.shape[0]), 1)  # pages of one block
    block = some * c
    # The last block may hold fewer pages; it is filled up with page 0, whose scores are cut off.
    padded = jnp.pad(pages, (0, -pages.shape[0] % some))

    def score(i: jax.Array, out: jax.Array) -> jax.Array:
        part = keys[jax.lax.dynamic_slice(padded, (i * some,), (some,))].reshape(block, stored)
        part = decode(part, q.dtype)
        return jax.lax.dynamic_update_slice(out, _scores(q, w, part, rounded), (0, i * block))

    empty = jnp.zeros((q.shape[0], padded.shape[0] * c), jnp.float32)
    blocks = (jnp.max(visible) + block - 1) // block
    return jax.lax.fori_loop(0, blocks, score, empty)[:, : pages.shape[0] * c]


def rows(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    visible: jax.Array,
    *,
    round_scores: bool = False,
    decode: Decode = numbers,
) -> jax.Array:
    """One row at a time, so that no key is copied twice."""

    def one(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, w, slot, visible = row
        return _one_slot(q[None], w[None], keys, table[slot], visible, round_scores, decode)[0]

    return jax.lax.map(one, (q, w, slot, visible))


def tiles(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    visible: jax.Array,
    *,
    round_scores: bool = False,
    decode: Decode = numbers,
) -> jax.Array:
    """Tiles of rows: one product where a tile is of one slot (a prompt), else row by row."""
    n = q.shape[0]
    if n < TILE:
        return rows(q, w, keys, table, slot, visible, round_scores=round_scores, decode=decode)
    count = -(-n // TILE)
    spare = count * TILE - n

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, spare), *((0, 0) for _ in x.shape[1:])), mode="edge")
        return padded.reshape(count, TILE, *x.shape[1:])

    def one(tile: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, w, slot, visible = tile
        return jax.lax.cond(
            jnp.all(slot == slot[0]),
            lambda: _one_slot(q, w, keys, table[slot[0]], visible, round_scores, decode),
            lambda: rows(
                q, w, keys, table, slot, visible, round_scores=round_scores, decode=decode
            ),
        )

    scores = jax.lax.map(one, (cut(q), cut(w), cut(slot), cut(visible)))
    return scores.reshape(count * TILE, -1)[:n]


def each_row(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    visible: jax.Array,
    *,
    round_scores: bool = False,
    decode: Decode = numbers,
) -> jax.Array:
    """`rows` by a loop that is never merged into its surroundings, to the last row that sees any.

    How many blocks of entries a row takes follows from its own number, and each is of one shape.
    """

    def one(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, w, slot, visible = row
        return _one_slot(q, w, keys, table[slot[0]], visible, round_scores, decode)

    count = jnp.arange(1, q.shape[0] + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(visible > 0, count, 0))
    return in_tiles(one, (q, w, slot, visible), used, size=1)


def gathered(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    table: jax.Array,
    slot: jax.Array,
    visible: jax.Array,
    *,
    round_scores: bool = False,
    decode: Decode = numbers,
) -> jax.Array:
    """All entries of all rows at once over a copy of each row's keys; the plain reference."""
    del visible
    own = decode(keys[table[slot]].reshape(q.shape[0], -1, keys.shape[-1]), q.dtype)
    one = jax.vmap(lambda q, w, keys: _scores(q[None], w[None], keys, round_scores)[0])
    return one(q, w, own)


KERNELS = (
    Kernel("index_scores", "tiles", tiles),
    Kernel("index_scores", "each_row", each_row, on=frozenset({"cpu"}), batch_invariant=True),
    Kernel("index_scores", "rows", rows),
    Kernel("index_scores", "gathered", gathered),
)
