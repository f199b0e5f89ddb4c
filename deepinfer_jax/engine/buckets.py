"""The sizes for which step programs are compiled, and a plan written into the arrays of one.

A step is padded to the smallest bucket that holds it, so that nothing is compiled after warm-up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ge
from typing import Any

import numpy as np

from deepinfer_jax.engine.plan import Limits, Plan
from deepinfer_jax.runner.layout import STOP_IDS, Bucket, DraftWord, Flag, Part

_SMALLEST_PREFILL, _SMALL_STEP = 32, 128
_FEW = 16


def plan_buckets(limits: Limits, keep: int = 0, *, varlen: bool = False) -> tuple[Bucket, ...]:
    """All buckets, smallest first.

    Rows are 1, 4, 16, 32, 64, ... up to the slots, then powers of two from 32 (or the next beyond
    the slots) up to a whole step; of less than 128 rows there is the whole step alone.

    With drafts there are also sizes that hold a few sequences with several rows each. With lengths
    that vary, steps of prompts come in a form without drafts too, since steps may propose none.

    Args:
        limits: sizes of the engine.
        keep: last prompt tokens that the decoder's layers run, 0 for all. Otherwise steps come in
            a second form, whose decoder rows hold every slot and the end of one prompt.
        varlen: not all drafts are verified in every step.
    """
    decode = [1]
    while decode[-1] < limits.slots:
        grow = 4 if decode[-1] < _FEW else 2  # few rows cost little more than one
        decode.append(min(grow * decode[-1], limits.slots))
    rows, more = set(decode), _SMALLEST_PREFILL
    while _SMALL_STEP <= limits.rows > more:
        rows |= {more} if more > limits.slots else set()
        more *= 2
    rows.add(limits.rows)
    sizes = {(n, min(n, limits.slots)) for n in rows}
    widths = {1 + limits.drafts} if limits.drafts else set()
    if limits.drafts and varlen:
        widths |= {2, 1 + -(-limits.drafts // 2)}
    sizes |= {(width * n, n) for n in decode for width in widths if width * n <= limits.rows}
    prompts = {(n, limits.slots) for n in rows if varlen and n > limits.slots}
    found = set()
    for n, parts in sizes:
        most = min(limits.drafts, n - parts)
        for drafts in {most, 0} if (n, parts) in prompts else {most}:
            found.add(Bucket(n, n, parts, limits.updates, drafts))
            kept = parts * (1 + drafts) + keep
            if keep and kept < n:
                found.add(Bucket(n, kept, parts, limits.updates, drafts))
    return tuple(sorted(found))


def fit(
    buckets: Sequence[Bucket], rows: int, decoder_rows: int, parts: int = 1, drafts: int = 0
) -> Bucket:
    """The smallest of `buckets` with so many rows, rows of the decoder, parts and drafts of one."""
    asked = rows, decoder_rows, parts, drafts
    return next(
        b for b in buckets if all(map(ge, (b.rows, b.decoder_rows, b.parts, b.drafts), asked))
    )


@dataclass(frozen=True, eq=False)
class Draws:
    """How the sequence of each slot draws and stops.

    Attributes:
        temperature, top_p: float32 [slots].
        top_k: int32 [slots], -1: off.
        seed: uint32 [slots, 2], low and high word.
        stops: int32 [slots, STOP_IDS], token ids that end it; -1: none.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray
    stops: np.ndarray

    @classmethod
    def greedy(cls, slots: int) -> "Draws":
        """Every slot takes the likeliest token and stops at its limit; the arrays are to be set."""
        return cls(
            temperature=np.zeros(slots, np.float32),
            top_p=np.ones(slots, np.float32),
            top_k=np.full(slots, -1, np.int32),
            seed=np.zeros((slots, 2), np.uint32),
            stops=np.full((slots, STOP_IDS), -1, np.int32),
        )


def pack(
    plan: Plan,
    draws: Draws,
    prompts: Mapping[int, np.ndarray],
    forced: np.ndarray | None = None,
    score_from: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The int32 and float32 arrays of a placed plan, laid out as `runner.layout` says.

    Args:
        plan: with a bucket.
        draws: of the slots.
        prompts: slot -> int32, the tokens that a prefill runs; read for prefill parts alone.
        forced: int32 [slots], the token that this step writes instead of a drawn one, -1: none.
        score_from: int32 [p], first position of each part whose row is scored, -1: none.
    """
    assert plan.bucket is not None, "a plan without rows has no arrays"
    ints, floats = plan.bucket.empty()
    ids, parts, stops, updates, drafting = plan.bucket.split(ints)
    slot, run, p = plan.slot, plan.running, len(plan.slot)
    offset = plan.offset
    columns: dict[Part, Any] = {
        Part.SLOT: slot,
        Part.OFFSET: offset,
        Part.COUNT: np.where(plan.prefill, plan.count, np.minimum(plan.count, plan.bucket.width)),
        Part.START: plan.start,
        Part.FLAGS: Flag.PROMPT * plan.prefill + Flag.DRAWS * plan.draws,
        Part.TOP_K: draws.top_k[slot],
        Part.SEED_LOW: draws.seed[slot, 0].view(np.int32),
        Part.SEED_HIGH: draws.seed[slot, 1].view(np.int32),
        Part.LIMIT: run.limit[slot],
        Part.WRITE_FROM: run.write_from[slot],
        Part.FLOOR: run.floor[slot],
        Part.KEEP_FROM: run.keep_from[slot],
        Part.FORCED: -1 if forced is None else forced[slot],
        Part.SCORE_FROM: -1 if score_from is None else score_from,
    }
    for column, values in columns.items():
        parts[:p, column] = values
    stops[:p] = draws.stops[slot]
    floats[:p, 0], floats[:p, 1] = draws.temperature[slot], draws.top_p[slot]
    updates[: len(plan.updates)] = plan.updates
    if plan.budget is not None:
        drafting[DraftWord.VERIFIED] = plan.budget
    drafting[DraftWord.PROPOSES] = plan.proposes
    for part in np.flatnonzero(plan.prefill):
        begin, start, count = offset[part], plan.start[part], plan.count[part]
        tokens = prompts[int(slot[part])]
        ids[begin : begin + count] = tokens[start : start + count]
        if start + count < len(tokens):
            parts[part, Part.NEXT] = tokens[start + count]
        elif forced is not None:
            parts[part, Part.NEXT] = forced[slot[part]]
    return ints, floats
