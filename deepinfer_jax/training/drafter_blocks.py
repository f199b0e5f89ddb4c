"""Anchors and blocks: which draft blocks a batch trains, what goes in, and what must come out.

An anchor is the newest known token of a sequence. Its block has `size` slots at the anchor's own
position and after; slot k predicts the token at anchor + k + 1 (drafting specification,
"DSpark / DFlash training step").
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Targets:
    """What the frozen target says about packed rows; r columns.

    Attributes:
        ids: int32 [b, r].
        segment: int32 [b, r], 0 for padding.
        mask: bool [b, r], the tokens that are trained (the assistant's own, end of turn included).
        taps: [b, r, taps d], what the drafter reads at each position.
        hidden: [b, r, d], after the target's final norm.
    """

    ids: jax.Array
    segment: jax.Array
    mask: jax.Array
    taps: jax.Array
    hidden: jax.Array


@flax.struct.dataclass
class Blocks:
    """Draft blocks of packed rows: a anchors a row, g slots a block.

    Attributes:
        anchors: int32 [b, a], ascending columns; 0 for a dummy.
        keep: bool [b, a], False for a dummy.
        inputs: int32 [b, a, g], the anchor's token and then noise; all noise in a dummy.
        previous: int32 [b, a, g], the true token before each label.
        labels: int32 [b, a, g], the true token of each slot.
        places: int32 [b, a, g], the column whose target distribution is that of the slot.
        valid: bool [b, a, g], the slots that count: from the first on as long as the labels are
            trained tokens of the anchor's segment.
    """

    anchors: jax.Array
    keep: jax.Array
    inputs: jax.Array
    previous: jax.Array
    labels: jax.Array
    places: jax.Array
    valid: jax.Array


def trained_tokens(weight: jax.Array) -> jax.Array:
    """bool [b, t]: the tokens that are trained by loss weights float32 [b, t].

    A weight stands one place before the token it trains.
    """
    return jnp.pad(weight[:, :-1] > 0, ((0, 0), (1, 0)))


def choose_anchors(
    key: jax.Array, mask: jax.Array, segment: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """int32 anchors [b, count] and bool keep [b, count].

    Candidates are columns that are trained together with their successor. Each row takes
    min(count, candidates) of them, uniformly without replacement, in ascending order; dummies at
    column 0 fill up.

    Args:
        key: of the draw. mask: bool [b, t]. segment: int32 [b, t]. count: anchors a row.
    """
    t = mask.shape[1]
    together = (segment[:, :-1] == segment[:, 1:]) & (segment[:, 1:] > 0)
    candidate = jnp.pad(mask[:, :-1] & mask[:, 1:] & together, ((0, 0), (0, 1)))
    lots = jnp.where(candidate, jax.random.uniform(key, mask.shape), -1.0)
    drawn, places = jax.lax.top_k(lots, min(count, t))
    places = jnp.sort(jnp.where(drawn >= 0, places, t), axis=1).astype(jnp.int32)
    places = jnp.pad(places, ((0, 0), (0, count - places.shape[1])), constant_values=t)
    keep = places < t
    return jnp.where(keep, places, 0), keep


def make_blocks(
    ids: jax.Array,
    segment: jax.Array,
    mask: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
    *,
    size: int,
    noise: int,
) -> Blocks:
    """The blocks of the anchors.

    Args:
        ids, segment: int32 [b, t]. mask: bool [b, t], the trained tokens.
        anchors: int32 [b, a]. keep: bool [b, a].
        size: slots g. noise: the token id of the slots behind the anchor.
    """
    b, a = anchors.shape
    t = ids.shape[1]
    slots = jnp.arange(size, dtype=jnp.int32)
    places = anchors[:, :, None] + slots
    inside = places + 1 < t
    before, after = jnp.minimum(places, t - 1), jnp.minimum(places + 1, t - 1)

    def at(table: jax.Array, columns: jax.Array) -> jax.Array:
        return jnp.take_along_axis(table, columns.reshape(b, -1), axis=1).reshape(columns.shape)

    own = at(segment, anchors)[:, :, None]
    counts = inside & at(mask, after) & (at(segment, after) == own) & keep[:, :, None]
    valid = jnp.cumprod(counts.astype(jnp.int32), axis=2) > 0
    first = (slots == 0) & keep[:, :, None]
    return Blocks(
        anchors=anchors,
        keep=keep,
        inputs=jnp.where(first, at(ids, anchors)[:, :, None], jnp.int32(noise)),
        previous=at(ids, before),
        labels=at(ids, after),
        places=before,
        valid=valid,
    )


def context_mask(blocks: Blocks, segment: jax.Array, window: int) -> jax.Array:
    """bool [b, a, t]: the context that all slots of a block see.

    Columns strictly before the anchor, at most `window` before it, in its segment; none for a
    dummy. segment int32 [b, t].
    """
    t = segment.shape[1]
    back = blocks.anchors[:, :, None] - jnp.arange(t, dtype=jnp.int32)
    own = jnp.take_along_axis(segment, blocks.anchors, axis=1)
    same = own[:, :, None] == segment[:, None, :]
    return (back >= 1) & (back <= window) & same & blocks.keep[:, :, None]


def rows_at(x: jax.Array, columns: jax.Array) -> jax.Array:
    """x [b, t, ...] at int32 columns [b, ...]: [b, columns of a row, ...]."""
    return jax.vmap(lambda row, at: row[at])(x, columns.reshape(columns.shape[0], -1))
