"""Which rows run in the next step: a pure function of the slots, the queue and the page count.

Decode comes first, then running prefills by admission, then admissions by aged priority and
arrival. With R rows a step and s sequences that decode:

- Every decoding sequence has its row in every step, however long the prompts beside it, and no
  step has more than R rows. It waits only where a page is missing: the first by (priority,
  admission) one step at most, and another one where an end meanwhile brings the page; the k-th at
  most k steps more. Its g drafts come with it where they fit into the pages that it has, so that s
  counts 1 + g rows for each.
- The oldest prefill of P tokens takes at most ceil(P / m) steps that have pages for it, where m is
  R - s rounded down to even. The next takes what it leaves.
- Nobody overtakes the first of the queue, so it runs as soon as those before it have left enough
  pages. Aging puts a request ahead of all that arrive d * aging_s seconds after it or later, where
  d is how much lower their priority number is. After `strikes` preemptions a sequence is admitted
  next and never preempted again.
- Pages are counted before they are given: `fresh` never exceeds the allocatable ones, and an
  admission leaves what admitted prompts still need and a page for each sequence that grows.
- At most one sequence is preempted a step: the one of lowest priority, then of latest admission,
  whose end frees pages. Its steps must have retired; else it pauses first, and its pages come in
  the next step just the same.

The caller takes in results up to `retired`, plans, releases the pages of ended and preempted slots
(their fence is `last`), shares the pages of the admitted (the first write_from / page of theirs),
allocates `fresh` pages, calls `place`, packs and launches. It goes on with the plan's `running`
also when there is nothing to launch: ends and preemptions stand in it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from deepinfer_jax.engine.buckets import fit
from deepinfer_jax.engine.plan import (
    ChooseDrafts,
    Ended,
    Limits,
    Plan,
    PreemptionMode,
    Running,
    View,
    Waiting,
    refusal,
)
from deepinfer_jax.engine.prefix import hit
from deepinfer_jax.errors import DeepInferError
from deepinfer_jax.runner.layout import Bucket

_COPIED = "request", "prompt", "limit", "priority", "preempted", "replay", "keep", "drafts"


def admission_order(waiting: Iterable[Waiting], now: float, limits: Limits) -> list[Waiting]:
    """The queue in the order in which it is admitted."""

    def key(w: Waiting) -> tuple[bool, int, float, int]:
        aged = w.priority - math.floor((now - w.arrival) / limits.aging_s)
        return w.preempted < limits.strikes, aged, w.arrival, w.request

    return sorted(waiting, key=key)


def plan(view: View, limits: Limits, buckets: Sequence[Bucket]) -> Plan:
    """The step `view.step`; `buckets` are from `plan_buckets`."""
    ended = _ended(view)
    run = view.running.copy()
    run.request[[slot for _, slot, _ in ended if slot is not None]] = -1
    held, count = run.allocated.copy(), np.zeros_like(run.computed)
    draft = _Draft(limits, run, run.computed.copy(), held, view.allocatable, count)
    prefill = (run.request >= 0) & (run.computed < run.prompt)
    # A sequence's last token is never run: nothing is launched beyond its limit.
    decode = (run.request >= 0) & ~prefill & (run.certain < run.limit - 1)
    need = decode & (run.computed >= run.allocated * limits.page)
    need &= run.computed < run.limit - 1  # beyond its end a sequence has no row

    preempted: list[tuple[int, PreemptionMode]] = []
    complete = not need.any() or np.count_nonzero(need) <= draft.spare()
    if not complete:
        needy = np.flatnonzero(need).tolist()
        served, victim = _shortage(view, draft, needy)
        complete = set(served) == set(needy)
        decode[needy] = need[needy] = False
        decode[served] = need[served] = True
        if victim is not None:
            decode[victim] = prefill[victim] = False
            if run.last[victim] <= view.retired:
                preempted.append((victim, _mode(view, limits, victim)))
                draft.pages += view.frees(victim)
                run.request[victim] = -1
    run.allocated[need] += 1
    draft.decode(decode)
    if view.drafting is not None:
        slots = np.flatnonzero(decode)
        prompts = int((run.prompt - run.computed)[prefill].sum())
        if (run.request < 0).any():
            prompts += sum(w.prompt for w in view.waiting)
        draft.save(slots, view.drafting, crowded=prompts >= limits.rows - len(slots))

    for slot in sorted(np.flatnonzero(prefill).tolist(), key=run.order.__getitem__):
        draft.extend(slot)
    admitted, refused = [], []
    if complete and not preempted and view.waiting:
        admitted, refused = _admit(view, draft, {request for request, _, _ in ended})
    made = draft.plan(view.step, buckets)
    return replace(
        made,
        admitted=tuple(admitted),
        preempted=tuple(preempted),
        refused=tuple(refused),
        ended=tuple(ended),
    )


@dataclass
class _Draft:
    """A step in the making: the slots after it; what it takes is the difference to before.

    Attributes:
        run: the slots after the step.
        start, held: positions and pages before it; an admitted slot has those of its hit.
        count: rows of each slot, at most.
        budget: rows of drafts in all; None for all of `count`. saved: rows that are left so.
        proposes: whether new ones are made.
        pages: that the step may take.
        matched: of admitted slots, the pages of their hits.
    """

    limits: Limits
    run: Running
    start: np.ndarray
    held: np.ndarray
    pages: int
    count: np.ndarray
    budget: int | None = None
    saved: int = 0
    proposes: bool = True
    matched: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows that are left."""
        return self.limits.rows - int(self.count.sum()) + self.saved

    @property
    def grown(self) -> np.ndarray:
        """New pages of each slot, int32 [slots]."""
        return self.run.allocated - self.held

    @property
    def owed(self) -> np.ndarray:
        """Pages set aside for each slot, int32 [slots]."""
        run = self.run
        rest = -(-(run.limit - 1) // self.limits.page) - run.allocated
        return np.where((run.request >= 0) & (run.preempted >= self.limits.strikes), rest, 0)

    def spare(self, slot: int | None = None) -> int:
        """Pages that are left for `slot`, or for a slot without any set aside."""
        left, owed = self.pages - int(self.grown.sum()), self.owed
        own = 0 if slot is None else int(owed[slot])
        return max(0, min(left, left - int(owed.sum()) + own))

    def decode(self, slots: np.ndarray) -> None:
        """A row for each of `slots` bool [slots], and rows for drafts where no page is missing."""
        run = self.run
        left = run.limit - 2 - run.certain
        room = run.allocated * self.limits.page - run.computed - 1
        drafts = np.clip(np.minimum(np.minimum(run.drafts, left), room), 0, None)
        self.count[slots] = 1 + drafts[slots]
        end = np.minimum(run.computed + self.count, run.limit - 1)
        run.computed[slots] = end[slots]
        run.certain[slots] += 1

    def save(self, slots: np.ndarray, drafting: ChooseDrafts, *, crowded: bool) -> None:
        """Let it decide how many of the drafts of `slots` int [n] are verified."""
        drafts = self.count[slots] - 1
        found = drafting(slots, drafts, crowded)
        self.proposes = found.proposes
        if len(slots):
            self.budget = min(found.verified, int(drafts.sum()))
            self.saved = int(drafts.sum()) - self.budget

    def extend(self, slot: int) -> bool:
        """Run as much as goes: of a prompt the rest, else one row. Returns whether any did."""
        run, page = self.run, self.limits.page
        start, stop = int(run.computed[slot]), int(run.prompt[slot])
        entries = int(self.grown.sum()) + sum(map(len, self.matched.values()))
        room = min(self.spare(slot), self.limits.updates - entries)
        if room < 0:  # its hit alone has more table entries than are left
            return False
        stop = max(stop, start + 1)
        end = min(stop, start + self.rows, (int(run.allocated[slot]) + room) * page)
        end = max(start, end if end == stop else end - end % 2)
        run.computed[slot] = run.certain[slot] = end
        self.count[slot] = end - start
        run.allocated[slot] = max(int(run.allocated[slot]), self.limits.pages_for(end))
        return end > start

    def promised(self) -> int:
        """Pages that an admission leaves: of admitted prompts, and one for each that grows."""
        run, page = self.run, self.limits.page
        soft = (run.request >= 0) & (run.preempted < self.limits.strikes)
        prompt = np.maximum(-(-run.prompt // page), run.allocated)
        grows = -(-(run.limit - 1) // page) > prompt
        return int((prompt - run.allocated + grows)[soft].sum())

    def plan(self, step: int, buckets: Sequence[Bucket]) -> Plan:
        """The parts and updates."""
        run, grown = self.run, self.grown
        active = np.flatnonzero(self.count)
        prompt = self.start[active] < run.prompt[active]
        chunks = active[prompt]
        slot = np.concatenate([active[~prompt], chunks[np.argsort(run.order[chunks])]])
        start, count = self.start[slot], self.count[slot]
        prefill = start < run.prompt[slot]
        end = start + count
        run.last[slot] = step
        bucket = None
        if len(slot):
            kept = end - np.clip(run.keep_from[slot], start, end)
            drafts = int(count[~prefill].max(initial=1)) - 1
            if self.budget is not None:
                drafts = min(drafts, self.budget)
            rows, kept_rows = int(count.sum()) - self.saved, int(kept.sum()) - self.saved
            bucket = fit(buckets, rows, kept_rows, len(slot), drafts)

        # Of a slot the pages of its hit come first, so that its entries stand in order.
        updates = [np.zeros((0, 3), np.int64)]
        for taker, pages in self.matched.items():
            number = np.arange(len(pages))
            updates.append(np.stack([np.full_like(number, taker), number, np.array(pages, int)], 1))
        owner = np.repeat(np.arange(len(grown)), grown)
        place = self.held[owner] + np.arange(len(owner)) - (np.cumsum(grown) - grown)[owner]
        updates.append(np.stack([owner, place, np.zeros_like(owner)], 1))
        return Plan(
            step=step,
            bucket=bucket,
            slot=slot.astype(np.int32),
            start=start,
            count=count,
            prefill=prefill,
            draws=end >= run.prompt[slot],
            updates=np.concatenate(updates).astype(np.int32),
            fresh=len(owner),
            running=run,
            budget=self.budget,
            proposes=self.proposes,
        )


def _ended(view: View) -> list[Ended]:
    """Requests whose caller has gone or whose time is over."""
    run = view.running
    late = (run.request >= 0) & (run.deadline <= view.now)
    if view.aborted:
        late |= (run.request >= 0) & np.isin(run.request, list(view.aborted))
    found = [(int(run.request[slot]), int(slot)) for slot in np.flatnonzero(late)]
    found += [
        (w.request, None)
        for w in view.waiting
        if w.deadline <= view.now or w.request in view.aborted
    ]
    return [(r, slot, "abort" if r in view.aborted else "deadline") for r, slot in found]


def _shortage(view: View, draft: _Draft, needy: list[int]) -> tuple[list[int], int | None]:
    """Who of `needy` gets a page when there are too few, and who is to give up its own, or None.

    Pages that come back with a step under way are waited for: they are here in the next step.
    """
    run, strikes = draft.run, draft.limits.strikes

    def rank(slot: int) -> tuple[bool, int, int]:
        return run.preempted[slot] < strikes, run.priority[slot], run.order[slot]

    def serve(slots: list[int], pages: int) -> list[int]:
        owed, served = draft.owed, []
        spare = pages - int(owed.sum())
        for slot in sorted(slots, key=rank):
            if (pages if owed[slot] else spare) > 0:
                served.append(slot)
                pages -= 1
                spare -= not owed[slot]
        return served

    served = serve(needy, draft.pages)
    if len(serve(needy, draft.pages + view.pending)) == len(needy):
        return served, None
    able = np.flatnonzero((run.request >= 0) & (run.preempted < strikes)).tolist()
    worst_first = sorted(able, key=rank, reverse=True)
    # Where every page has two holders, only several ends free one: the first of them.
    victim = next((s for s in worst_first if view.frees(s) > 0), next(iter(worst_first), None))
    if victim is None:
        return served, None
    freed = view.frees(victim) if run.last[victim] <= view.retired else 0
    return serve([s for s in needy if s != victim], draft.pages + freed), victim


def _mode(view: View, limits: Limits, slot: int) -> PreemptionMode:
    """Swap if host memory has room, one step can bring it back, and its windows are complete."""
    run = view.running
    room = min(view.host_pages, limits.hit_pages)
    fits = run.allocated[slot] <= room and run.computed[slot] >= run.write_from[slot]
    return "swap" if fits else "recompute"


def _admit(
    view: View, draft: _Draft, over: set[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, DeepInferError]]]:
    """Admit the queue's first ones as far as slots, rows and pages go; (admitted, refused)."""
    limits, run = draft.limits, draft.run
    free = np.flatnonzero((run.request < 0) & (run.last <= view.retired)).tolist()
    admitted, refused = [], []
    if not free or draft.rows < 1:
        return admitted, refused
    queue = admission_order((w for w in view.waiting if w.request not in over), view.now, limits)
    for w in queue:
        error = refusal(w, limits)
        if error is not None:
            refused.append((w.request, error))
            continue
        if not free:
            break
        ahead, floor, start = _begin(w, limits)
        held = ahead // limits.page
        certain = w.preempted >= limits.strikes
        whole = limits.pages_for(w.limit - 1 if certain else max(w.prompt, w.swapped + 1))
        left = draft.spare() - (0 if certain else draft.promised())
        if whole - held + min(w.idle, held) > left:
            break
        slot = free.pop(0)
        for name in _COPIED:
            getattr(run, name)[slot] = getattr(w, name)
        run.arrival[slot], run.deadline[slot] = w.arrival, w.deadline
        run.write_from[slot], run.floor[slot] = ahead, floor
        run.computed[slot] = run.certain[slot] = draft.start[slot] = start
        run.allocated[slot] = draft.held[slot] = held
        run.order[slot] = run.order.max() + 1
        draft.matched[slot] = w.pages[:held]
        draft.pages -= min(w.idle, held)
        if not draft.extend(slot):
            # No row or no table entry is left; of an empty slot only its pages are counted.
            run.request[slot] = -1
            run.allocated[slot] = held
            del draft.matched[slot]
            break
        admitted.append((w.request, slot))
    return admitted, refused


def _begin(w: Waiting, limits: Limits) -> tuple[int, int, int]:
    """(positions that are read from shared pages, window floor, first position to run)."""
    if w.swapped:
        return 0, 0, w.swapped
    if w.fork:
        return len(w.pages) * limits.page, 0, w.prompt - 1
    ahead, floor = hit(min(len(w.pages), limits.hit_pages), w.prompt, w.replay, limits.page)
    return ahead, floor, max(floor - limits.look_back, 0)
