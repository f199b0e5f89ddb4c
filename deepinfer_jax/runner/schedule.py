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
from deepinfer_jax.runner.layout import Bucket, DraftWord, Flag, Part
from deepinfer_jax.sampling.lengths import split, survival
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
        drafts: proposed for the tokens after the last, or None without a drafter.
    """

    cache: Cache
    token: jax.Array
    length: jax.Array
    done: jax.Array
    drafts: "Drafts | None" = None


@flax.struct.dataclass
class Drafts:
    """What each slot's drafter proposed last; g tokens.

    Attributes:
        token: int32 [slots, g], -1 where nothing was proposed.
        confidence: float32 [slots, g], estimated probability that a draft is kept if those before
            it are.
        logprobs: float32 [slots, g, v], what the drafts were drawn from; None where verification
            does not ask.
    """

    token: jax.Array
    confidence: jax.Array
    logprobs: jax.Array | None = None


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
    """A step as the forward and the sampler take it; p parts, w tokens of one at most, d draws.

    Attributes:
        rows: [n]. kept: the decoder's rows, None for all.
        take: int32 [d], rows after which a token is drawn, among those that leave the last layer:
            of a prompt the last, else all; those of a part together.
        draw: how each of the d tokens is drawn. forced: int32 [d], -1 for none.
        at: int32 [p, w], the part's draws; those from `drawn` int32 [p] on are not its own.
        drafts: int32 [p, w - 1], what is verified, -1 for nothing.
        slot: int32 [p], impossible where nothing may be written.
        end: int32 [p], positions in the caches after the part's first draw.
        floor: int32 [p], lowest position of which the decoder's layers hold window keys.
        last: int32 [p], positions after the step if every draft is kept.
        draws: bool [p], a token of this part counts. limit: int32 [p]. stops: int32 [p, s].
        owner: int32 [n], the part of each row; padding has one too.
        target: int32 [n], the token that a row is scored against, -1 for none.
        proposes: bool [], new drafts are wanted.
    """

    rows: Rows
    kept: Kept | None
    take: jax.Array
    draw: RowParams
    forced: jax.Array
    at: jax.Array
    drawn: jax.Array
    drafts: jax.Array
    slot: jax.Array
    end: jax.Array
    floor: jax.Array
    last: jax.Array
    draws: jax.Array
    limit: jax.Array
    stops: jax.Array
    owner: jax.Array
    target: jax.Array
    proposes: jax.Array


@flax.struct.dataclass
class Emitted:
    """What the parts of a step give away; p parts, w tokens at most.

    Attributes:
        count: int32 [p], tokens; 0 where none counts.
        accepted: int32 [p], drafts that were kept. offered: int32 [p], that were verified.
        ended: bool [p], the last token ended the sequence as far as the device can tell.
    """

    count: jax.Array
    accepted: jax.Array
    offered: jax.Array
    ended: jax.Array


def with_pages(cache: Cache, inputs: StepInput, bucket: Bucket) -> Cache:
    """The caches with the step's new page-table entries."""
    _, _, _, updates, _ = bucket.split(inputs.ints)
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
    varlen: bool = False,
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
        varlen: the plan's budget of rows goes to the drafts that are likeliest to be kept.
    """
    ids, part, stops, _, drafting = bucket.split(inputs.ints)
    column = {field: part[:, field] for field in Part}
    known = column[Part.SLOT] >= 0
    slot = jnp.maximum(column[Part.SLOT], 0)
    prompt = (column[Part.FLAGS] & Flag.PROMPT) > 0
    alive = known & (prompt | ~state.done[slot])
    start = jnp.where(prompt, column[Part.START], state.length[slot])
    count = jnp.where(known, column[Part.COUNT], 0)
    proposed = jnp.zeros((bucket.parts, 0), jnp.int32)
    if bucket.drafts:
        assert state.drafts is not None, "a bucket with drafts, and a state without"
        proposed = state.drafts.token[slot, : bucket.drafts]
        # The host knows a decode part's beginning at best as a bound.
        room = jnp.maximum(column[Part.LIMIT] - 1 - start, 1)
        # A step may have gone by that proposed nothing.
        room = jnp.minimum(room, 1 + (proposed >= 0).sum(-1, dtype=jnp.int32))
        count = jnp.where(prompt, count, jnp.minimum(count, room))
        if varlen:
            sure = survival(state.drafts.confidence[slot, : bucket.drafts])
            decodes = known & ~prompt
            budget = drafting[DraftWord.VERIFIED]
            total = jnp.where(budget < 0, bucket.rows, budget)
            total += decodes.sum(dtype=jnp.int32)
            offered = jnp.where(decodes, jnp.where(alive, count - 1, 0), -1)
            count = jnp.where(prompt, count, split(sure, offered, total))
        place = jnp.arange(bucket.drafts, dtype=jnp.int32)
        verified = ~prompt[:, None] & (place < count[:, None] - 1)
        proposed = jnp.where(verified, proposed, -1)
    own = jnp.where(prompt, 0, count)
    offset = jnp.where(prompt, column[Part.OFFSET], jnp.cumsum(own) - own)
    # Parts that are not there come last; behind all others, so that the search stays sorted.
    offset = jnp.where(known, offset, bucket.rows)
    end = start + count

    owner, real = _owner(offset, count, bucket.rows)
    real &= alive[owner]
    row = jnp.arange(bucket.rows, dtype=jnp.int32)
    within = row - offset[owner]
    position = jnp.where(real, start[owner] + within, -1)
    going_on = state.token[slot][owner]
    if bucket.drafts:
        at = jnp.clip(within - 1, 0, bucket.drafts - 1)
        going_on = jnp.where(within > 0, jnp.maximum(proposed[owner, at], 0), going_on)
    rows = Rows(
        ids=jnp.where(prompt[owner], ids, going_on),
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

    drawn = jnp.where(prompt, jnp.minimum(count, 1), count)
    first = jnp.cumsum(drawn) - drawn
    of, _ = _owner(first, drawn, bucket.draws)
    back = drawn[of] - 1 - (jnp.arange(bucket.draws, dtype=jnp.int32) - first[of])
    # A decode part's place in the caches is only known here, so its draw is placed here too.
    draw = RowParams(
        temperature=inputs.floats[:, 0][of],
        top_p=inputs.floats[:, 1][of],
        top_k=column[Part.TOP_K][of],
        seed=jnp.stack([column[Part.SEED_LOW], column[Part.SEED_HIGH]], -1).view(jnp.uint32)[of],
        position=end[of] - back,
    )
    return Scheduled(
        rows=rows,
        kept=kept,
        take=jnp.maximum(last[of] - back, 0),
        draw=draw,
        forced=column[Part.FORCED][of],
        at=jnp.minimum(
            first[:, None] + jnp.arange(bucket.width, dtype=jnp.int32), bucket.draws - 1
        ),
        drawn=drawn,
        drafts=proposed,
        slot=jnp.where(alive, slot, _NOWHERE),
        end=end - drawn + 1,
        floor=jnp.maximum(column[Part.FLOOR], column[Part.KEEP_FROM] if truncate else 0),
        last=end,
        draws=alive & ((column[Part.FLAGS] & Flag.DRAWS) > 0),
        limit=column[Part.LIMIT],
        stops=stops,
        owner=owner,
        target=jnp.where(scored, following, -1),
        proposes=drafting[DraftWord.PROPOSES] > 0,
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


def emit(step: Scheduled, token: jax.Array, bad: jax.Array, accepted: jax.Array) -> Emitted:
    """How many of a part's tokens count: those after the drafts that were kept, up to an end.

    Args:
        step: the scheduled step.
        token: int32 [p, w], what was drawn. bad: bool [p, w], nothing could be drawn.
        accepted: int32 [p], drafts of each part that verification kept.
    """
    place = jnp.arange(token.shape[1], dtype=jnp.int32)
    stop = (token[:, :, None] == step.stops[:, None]).any(-1) | bad
    stop |= step.end[:, None] + place + 1 >= step.limit[:, None]
    stop &= place <= accepted[:, None]
    until = jnp.where(stop.any(-1), jnp.argmax(stop, -1).astype(jnp.int32), accepted)
    return Emitted(
        count=jnp.where(step.draws, until + 1, 0),
        accepted=jnp.where(step.draws, until, 0),
        offered=jnp.where(step.draws, step.drawn - 1, 0),
        ended=step.draws & stop.any(-1),
    )


def committed(
    state: EngineState, cache: Cache, step: Scheduled, token: jax.Array, emitted: Emitted
) -> EngineState:
    """The state after a step that drew `token` int32 [p, w], of which `emitted` counts.

    Rows of drafts that were not kept stay in the caches behind the length, where nothing reads
    them before they are written again.
    """
    ahead = jnp.maximum(emitted.count - 1, 0)
    last = jnp.take_along_axis(token, ahead[:, None], 1)[:, 0]
    drawn = jnp.where(step.draws, step.slot, _NOWHERE)
    length = jnp.where(step.draws, step.end + ahead, step.last)
    return replace(
        state,
        cache=cache,
        token=state.token.at[drawn].set(last, mode="drop"),
        length=state.length.at[step.slot].set(length, mode="drop"),
        done=state.done.at[step.slot].set(emitted.ended, mode="drop"),
    )
