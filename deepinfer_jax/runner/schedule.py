"""The device's half of scheduling: from a plan and the state to the rows of a step, and back.

What the host cannot know yet when it launches a step, the tokens of the step before and who ended
with them, is read here from the state; so the next step never waits for the host.
"""

from dataclasses import replace
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.model.cache import Cache, Rows
from deepinfer_jax.model.transformer import Kept
from deepinfer_jax.runner.layout import Bucket, Flag, Part
from deepinfer_jax.sampling.sampler import RowParams

_NOWHERE = jnp.iinfo(jnp.int32).max  # an index that a scatter drops


@flax.struct.dataclass
class EngineState:
    """What stays on the device between steps; donated to every step.

    Attributes:
        cache: caches of all sequences, with their page tables.
        token: int32 [slots], the last token of each sequence, whose row comes next.
        length: int32 [slots], positions that are in the caches.
        done: bool [slots], the last token ended the sequence: its rows in later steps do nothing.
    """

    cache: Cache
    token: jax.Array
    length: jax.Array
    done: jax.Array


@flax.struct.dataclass
class StepInput:
    """What the host sends.

    Attributes:
        ints: int32, the plan as `runner.layout` describes.
        floats: float32 [p, 2].
        memory: looked-up Engram rows per Engram layer, when the tables are not on the device.
    """

    ints: jax.Array
    floats: jax.Array
    memory: tuple[jax.Array, ...] | None = None


class Scheduled(NamedTuple):
    """A step as the forward and the sampler take it; p parts.

    Attributes:
        rows: [n]. kept: the decoder's rows, None for all.
        take: int32 [p], the part's last row among those that leave the last layer.
        draw: how its token is drawn. forced: int32 [p], -1 for none.
        slot: int32 [p], impossible where nothing may be written.
        end: int32 [p], positions in the caches after the step.
        draws: bool [p], a token of this part counts. limit: int32 [p]. stops: int32 [p, s].
        owner: int32 [n], the part of each row; padding has one too.
        target: int32 [n], the token that a row is scored against, -1 for none.
    """

    rows: Rows
    kept: Kept | None
    take: jax.Array
    draw: RowParams
    forced: jax.Array
    slot: jax.Array
    end: jax.Array
    draws: jax.Array
    limit: jax.Array
    stops: jax.Array
    owner: jax.Array
    target: jax.Array


def with_pages(cache: Cache, inputs: StepInput, bucket: Bucket) -> Cache:
    """The caches with the step's new page-table entries."""
    _, _, _, updates = bucket.split(inputs.ints)
    slot = jnp.where(updates[:, 0] < 0, _NOWHERE, updates[:, 0])
    return replace(cache, table=cache.table.at[slot, updates[:, 1]].set(updates[:, 2], mode="drop"))


def _owner(offset: jax.Array, count: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """The part of each of `rows` rows, int32, and whether it has one, when parts stand in order."""
    row = jnp.arange(rows, dtype=jnp.int32)
    part = jnp.searchsorted(offset + count, row, side="right").astype(jnp.int32)
    part = jnp.minimum(part, offset.shape[0] - 1)
    return part, (row >= offset[part]) & (row < offset[part] + count[part])


def derive(
    state: EngineState,
    inputs: StepInput,
    bucket: Bucket,
    *,
    truncate: bool = False,
    first_exact: bool = False,
) -> Scheduled:
    """The rows, the draws and the stop conditions of a step.

    Args:
        state: before the step.
        inputs: the plan.
        bucket: its sizes.
        truncate: the decoder's layers honour `Part.KEEP_FROM` (bounded replay); where the bucket
            has fewer decoder rows than rows, they run the kept rows alone, else all rows, of which
            those before leave no window keys.
        first_exact: see `model.transformer.Kept`.
    """
    ids, part, stops, _ = bucket.split(inputs.ints)
    column = {field: part[:, field] for field in Part}
    known = column[Part.SLOT] >= 0
    slot = jnp.maximum(column[Part.SLOT], 0)
    prompt = (column[Part.FLAGS] & Flag.PROMPT) > 0
    alive = known & (prompt | ~state.done[slot])
    start = jnp.where(prompt, column[Part.START], state.length[slot])
    offset, count = column[Part.OFFSET], jnp.where(known, column[Part.COUNT], 0)
    # Parts that are not there come last; behind all others, so that the search stays sorted.
    offset = jnp.where(known, offset, bucket.rows)
    end = start + count

    owner, real = _owner(offset, count, bucket.rows)
    real &= alive[owner]
    row = jnp.arange(bucket.rows, dtype=jnp.int32)
    position = jnp.where(real, start[owner] + row - offset[owner], -1)
    rows = Rows(
        ids=jnp.where(prompt[owner], ids, state.token[slot][owner]),
        position=position,
        slot=slot[owner],
        start=start[owner],
        stop=end[owner],
        floor=column[Part.FLOOR][owner],
        write_from=column[Part.WRITE_FROM][owner],
    )
    kept, last = None, offset + count - 1
    if truncate:
        keep_from = column[Part.KEEP_FROM]
        kept, last = _kept(rows, bucket, keep_from, start, count, offset, alive)
        kept = replace(kept, first_exact=first_exact)
    # Rows of a part follow each other, so the token after a row is the next row's, or NEXT.
    following = jnp.where(
        row == (offset + count - 1)[owner], column[Part.NEXT][owner], jnp.roll(ids, -1)
    )
    score_from = column[Part.SCORE_FROM][owner]
    scored = real & prompt[owner] & (score_from >= 0) & (position >= score_from)
    # A decode part's place in the caches is only known here, so its draw is placed here too.
    draw = RowParams(
        temperature=inputs.floats[:, 0],
        top_p=inputs.floats[:, 1],
        top_k=column[Part.TOP_K],
        seed=jnp.stack([column[Part.SEED_LOW], column[Part.SEED_HIGH]], -1).view(jnp.uint32),
        position=end,
    )
    return Scheduled(
        rows=rows,
        kept=kept,
        take=jnp.maximum(last, 0),
        draw=draw,
        forced=column[Part.FORCED],
        slot=jnp.where(alive, slot, _NOWHERE),
        end=end,
        draws=alive & ((column[Part.FLAGS] & Flag.DRAWS) > 0),
        limit=column[Part.LIMIT],
        stops=stops,
        owner=owner,
        target=jnp.where(scored, following, -1),
    )


def _kept(
    rows: Rows,
    bucket: Bucket,
    keep_from: jax.Array,
    start: jax.Array,
    count: jax.Array,
    offset: jax.Array,
    alive: jax.Array,
) -> tuple[Kept, jax.Array]:
    """The decoder's rows, and each part's last one among them."""
    owner, _ = _owner(offset, count, bucket.rows)
    lowest = keep_from[owner]
    # A row before the kept ones sees no window key of the decoder and leaves none there.
    floor = jnp.where(rows.position < lowest, rows.position + 1, jnp.maximum(rows.floor, lowest))
    whole = replace(rows, floor=floor)
    if bucket.decoder_rows == bucket.rows:
        return Kept(None, whole), offset + count - 1
    first = jnp.clip(keep_from, start, start + count)
    number = start + count - first
    begin = jnp.cumsum(number) - number
    part, real = _owner(begin, number, bucket.decoder_rows)
    row = jnp.arange(bucket.decoder_rows, dtype=jnp.int32)
    index = jnp.where(real, offset[part] + first[part] - start[part] + row - begin[part], 0)
    chosen: Rows = jax.tree.map(lambda x: x[index], whole)
    real &= alive[part]
    chosen = replace(chosen, position=jnp.where(real, chosen.position, -1), start=first[part])
    return Kept(index, chosen), begin + number - 1


def committed(
    state: EngineState, cache: Cache, step: Scheduled, token: jax.Array, bad: jax.Array
) -> tuple[EngineState, jax.Array]:
    """The state after a step whose parts drew `token` int32 [p], and who ended, bool [p].

    `bad` bool [p]: nothing could be drawn.
    """
    stop = (token[:, None] == step.stops).any(-1) | bad
    stop |= step.end + 1 >= step.limit
    ended = step.draws & stop
    drawn = jnp.where(step.draws, step.slot, _NOWHERE)
    state = EngineState(
        cache=cache,
        token=state.token.at[drawn].set(token, mode="drop"),
        length=state.length.at[step.slot].set(step.end, mode="drop"),
        done=state.done.at[step.slot].set(ended, mode="drop"),
    )
    return state, ended
