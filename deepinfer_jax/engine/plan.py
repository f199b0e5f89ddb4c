"""What the planner reads and what it answers: sizes, waiting and running sequences, and the plan.

A sequence is one sample of a request and has an integer of its own, here called `request`.
Positions count from 0; a sequence of total length t has tokens at 0 .. t - 1, and its last token
is never run, so it needs the pages of t - 1 positions.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from deepinfer_jax.engine.prefix import PAGE
from deepinfer_jax.errors import ConfigError, DeepInferError, MemoryPlanError, RequestError
from deepinfer_jax.runner.layout import Bucket

PreemptionMode = Literal["recompute", "swap"]
EndReason = Literal["abort", "deadline"]
# Request, slot (None while it waits), reason.
Ended = tuple[int, int | None, EndReason]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of one engine.

    Attributes:
        slots: sequences that run at the same time (max_num_seqs).
        rows: of one step at most (max_num_batched_tokens).
        pages: of the cache, page 0 included.
        page: tokens of a page.
        max_model_len: longest sequence, in tokens.
        table_pages: width of a slot's page table.
        updates: page-table entries that one step can send.
        look_back: tokens that run before the replay of a hit, for their ids alone; even.
        aging_s: seconds of waiting that count as one level of priority.
        strikes: preemptions after which a sequence is admitted next, all its pages set aside.
        drafts: tokens of a sequence that a step verifies at most.
        backtrack: positions that rings keep beyond their window, at least drafts + 1.

    Raises:
        ConfigError: a step is too small for every slot to go on.
    """

    slots: int
    rows: int
    pages: int
    page: int = PAGE
    max_model_len: int
    table_pages: int
    updates: int
    look_back: int = 0
    aging_s: float = 10.0
    strikes: int = 3
    drafts: int = 0
    backtrack: int = 6

    def __post_init__(self) -> None:
        verified = self.slots * (1 + self.drafts)
        if self.drafts and self.rows <= verified:
            raise ConfigError(
                f"A step has {self.rows} rows for {self.slots} sequences with {self.drafts} drafts "
                "each.",
                f"Verifying all of them takes {verified} rows, and a prompt needs one besides.",
                f"Set rows to at least {verified + 1}, run fewer sequences, or draft less.",
            )
        for name in ("rows", "updates"):
            if getattr(self, name) <= self.slots:
                raise ConfigError(
                    f"A step has {getattr(self, name)} {name} for {self.slots} sequences.",
                    "Each sequence may take one in every step, and a prompt needs one besides.",
                    f"Set {name} to at least {self.slots + 1}, or run fewer sequences.",
                )
        if self.page < 2 or self.page % 2:
            raise ConfigError(
                f"A page of {self.page} tokens cannot be used.",
                "The compressor makes one entry of two tokens, and both belong to one page.",
                "Use an even page, such as 128.",
            )

    @property
    def hit_pages(self) -> int:
        """Pages of a prefix that one admission can take over; its table goes out in one step."""
        return self.updates - self.slots - 1

    def pages_for(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.page)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A sequence that waits for a slot.

    Attributes:
        request: its number.
        prompt: tokens to run before the next draw: after a recomputing preemption outputs as well.
        limit: longest total length, at least prompt + 1.
        arrival: seconds. deadline: seconds on the same clock.
        priority: lower goes first.
        pages: published pages of its prefix, in order, cut to what `prefix.hit` uses.
        idle: how many of them count as allocatable (`PagePool.idle`); 0 if they are pinned.
        replay: tokens that are computed again before the end of a hit.
        keep: last prompt tokens that the decoder's layers run; 0: all.
        preempted: how often.
        swapped: positions whose pages and slot state lie in host memory; they come back as they
            were, before the step runs.
        drafts: tokens that a step may verify at most.
        fork: `pages` are those of a running sample of the same request, whose prompt has just been
            launched; its slot's state is copied before the step runs, and only the prompt's last
            token is run again.
    """

    request: int
    prompt: int
    limit: int
    arrival: float = 0.0
    deadline: float = math.inf
    priority: int = 0
    pages: tuple[int, ...] = ()
    idle: int = 0
    replay: int = PAGE
    keep: int = 0
    preempted: int = 0
    swapped: int = 0
    drafts: int = 0
    fork: bool = False


def refusal(waiting: Waiting, limits: Limits) -> DeepInferError | None:
    """Why a sequence can never run to its longest length, or None."""
    tokens, most = waiting.limit, limits.max_model_len
    asked = f"Request {waiting.request}: prompt {waiting.prompt} + output {tokens - waiting.prompt}"
    if tokens > most:
        return RequestError(
            f"{asked} exceeds max_model_len {most}.",
            "Nothing was truncated.",
            f"Shorten the prompt or lower max_tokens, by {tokens - most} tokens together.",
        )
    need, room = limits.pages_for(tokens - 1), min(limits.pages - 1, limits.table_pages)
    if need > room:
        return MemoryPlanError(
            f"{asked} tokens need {need} pages of {limits.page} tokens; there are {room}.",
            "It could not end even if it ran alone.",
            f"Stay within {room * limits.page + 1} tokens, or give the cache more memory.",
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Running:
    """The slots, as arrays [slots]: int32, and float64 for times.

    Attributes:
        request: -1 for an empty slot.
        prompt, limit, priority, preempted, replay, keep, drafts: as in `Waiting`.
        arrival, deadline: likewise.
        computed: positions that were launched, if all drafts under way are kept.
        certain: positions that were launched, if none of them is.
        allocated: pages in its table.
        write_from: rows of lower positions write no pages: those came with a hit.
        floor: first position that was run after a hit.
        order: of admission.
        last: the last launched step that names the slot; stays when the slot becomes empty.
    """

    request: np.ndarray
    prompt: np.ndarray
    limit: np.ndarray
    priority: np.ndarray
    preempted: np.ndarray
    replay: np.ndarray
    keep: np.ndarray
    drafts: np.ndarray
    computed: np.ndarray
    certain: np.ndarray
    allocated: np.ndarray
    write_from: np.ndarray
    floor: np.ndarray
    order: np.ndarray
    last: np.ndarray
    arrival: np.ndarray
    deadline: np.ndarray

    @classmethod
    def empty(cls, slots: int) -> Self:
        """Nobody runs."""
        times = {"arrival", "deadline"}
        names = [f.name for f in dataclasses.fields(cls)]
        made = cls(**{n: np.zeros(slots, np.float64 if n in times else np.int32) for n in names})
        made.request[:], made.deadline[:] = -1, np.inf
        return made

    def copy(self) -> Self:
        """The same values in arrays of their own."""
        return type(self)(**{name: array.copy() for name, array in vars(self).items()})

    def without(self, slots: Sequence[int] | np.ndarray) -> Self:
        """With these slots empty: their sequences have ended."""
        request = self.request.copy()
        request[np.asarray(slots, np.int64)] = -1
        return dataclasses.replace(self, request=request)

    def known(self, slot: int, positions: int, counts: Sequence[int]) -> None:
        """Note, in place, where a decoding slot stands, and the rows of its steps under way."""
        end = int(self.limit[slot]) - 1
        self.computed[slot] = min(positions + sum(counts), end)
        self.certain[slot] = min(positions + len(counts), end)

    @property
    def keep_from(self) -> np.ndarray:
        """First position that the decoder's layers run, int32 [slots]."""
        return np.where(self.keep > 0, np.maximum(self.prompt - self.keep, 0), 0)

    def requeued(self, slot: int, length: int, mode: PreemptionMode) -> Waiting:
        """The record of a preempted sequence, which has `length` tokens by now.

        To be called on the `running` that the plan was made from.
        """
        computed, prompt, keep = (int(x[slot]) for x in (self.computed, self.prompt, self.keep))
        if mode == "recompute":
            # The same rows as before skip the decoder's layers, so that the results stay.
            prompt, keep = length, keep and keep + length - prompt
        return Waiting(
            request=int(self.request[slot]),
            prompt=prompt,
            limit=int(self.limit[slot]),
            arrival=float(self.arrival[slot]),
            deadline=float(self.deadline[slot]),
            priority=int(self.priority[slot]),
            replay=int(self.replay[slot]),
            keep=keep,
            preempted=int(self.preempted[slot]) + 1,
            drafts=int(self.drafts[slot]),
            swapped=computed if mode == "swap" else 0,
        )


@dataclass(frozen=True)
class DraftChoice:
    """What a step does about drafts.

    Attributes:
        verified: rows of drafts that it verifies. proposes: whether it makes new ones.
    """

    verified: int
    proposes: bool = True


ChooseDrafts = Callable[[np.ndarray, np.ndarray, bool], DraftChoice]
"""(slots that decode, drafts that each can have verified, prompts fill the step) -> the choice."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All that a plan depends on besides the sizes.

    Attributes:
        step: id of the step to plan. retired: id of the last step whose results are all taken in.
        now: seconds on the clock of arrivals and deadlines.
        running: the slots, without those whose end is known.
        waiting: a short list; a caller with a long one passes on those that come next.
        allocatable, pending: of the PagePool.
        frees: slot -> `PagePool.frees` of its pages; asked only when a page is missing.
        host_pages: pages that host memory can take from a preempted sequence.
        drafting: decides about drafts; None: all are verified, and new ones proposed.
        aborted: requests whose caller has gone.
    """

    step: int
    retired: int
    now: float
    running: Running
    waiting: Sequence[Waiting]
    allocatable: int
    pending: int
    frees: Callable[[int], int]
    host_pages: int = 0
    drafting: ChooseDrafts | None = None
    aborted: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One step, p parts: decode parts first, the rows of a part together, parts in order.

    Attributes:
        step: its id.
        bucket: the program's sizes; None when there is nothing to run.
        slot, start, count: int32 [p]; start is where a decode part stands at most, and count how
            many rows it has at most: one, and its drafts.
        budget: rows of drafts that the device gives to the decode parts; None for all.
        proposes: whether new ones are proposed.
        prefill: bool [p], the host gives the ids. draws: bool [p], a token is drawn at its end.
        updates: int32 [u, 3], new page-table entries: slot, place, page (0 until `place`); those of
            a slot in ascending places.
        fresh: how many of them need a page.
        running: the slots as the step leaves them.
        admitted: (request, slot).
        preempted: (slot, mode).
        refused: (request, error), will never fit.
        ended: by their caller or their deadline.
    """

    step: int
    bucket: Bucket | None
    slot: np.ndarray
    start: np.ndarray
    count: np.ndarray
    prefill: np.ndarray
    draws: np.ndarray
    updates: np.ndarray
    fresh: int
    running: Running
    budget: int | None = None
    proposes: bool = True
    admitted: tuple[tuple[int, int], ...] = ()
    preempted: tuple[tuple[int, PreemptionMode], ...] = ()
    refused: tuple[tuple[int, DeepInferError], ...] = ()
    ended: tuple[Ended, ...] = ()

    @property
    def offset(self) -> np.ndarray:
        """First row of each part, int32 [p]; of decode parts as if all drafts were verified."""
        count = self.count
        before = np.cumsum(count) - count
        if self.budget is None:
            return before
        decode = ~self.prefill
        saved = int(count[decode].sum() - decode.sum()) - self.budget
        return np.where(decode, before, before - saved)


def place(plan: Plan, pages: Sequence[int]) -> Plan:
    """The plan with its `fresh` new pages, from `PagePool.allocate`, put into its updates."""
    updates = plan.updates.copy()
    updates[updates[:, 2] == 0, 2] = pages
    return dataclasses.replace(plan, updates=updates)
