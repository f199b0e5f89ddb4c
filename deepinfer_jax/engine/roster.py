"""Who waits, who runs, and what each holds: the host's books, which a plan is made from.

The books change in one place, `settle`, which takes a plan's decisions over and says what has to
move on the device before its step runs.
"""

import heapq
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from deepinfer_jax.engine import plan as planning
from deepinfer_jax.engine.buckets import Draws
from deepinfer_jax.engine.meter import Meter
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.plan import Limits, Plan, Running, View, Waiting
from deepinfer_jax.engine.planner import admission_order
from deepinfer_jax.engine.prefix import Provenance, Reuse, extend_keys, hit
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.varlen import Lengths
from deepinfer_jax.runner.layout import STOP_IDS
from deepinfer_jax.sampling.philox import split64

_IN_SIGHT = 256  # waiting sequences that a plan considers
_SORTED_FOR = 1.0  # seconds; the queue's order changes slowly, by aging


@dataclass
class Moves:
    """What moves on the device before a step, in this order.

    Attributes:
        dropped: sequences that ended while their pages were in host memory.
        saved: (sequence, slot, pages) to host memory.
        copied: (slot, its page, other slot, the other's page): the slot's state and that page.
        loaded: (sequence, slot, pages) from host memory.
    """

    dropped: list[int] = field(default_factory=list)
    saved: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copied: list[tuple[int, int, int, int]] = field(default_factory=list)
    loaded: list[tuple[int, int, list[int]]] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether there is something to do."""
        return bool(self.dropped or self.saved or self.copied or self.loaded)


class Roster:
    """The sequences of one engine, their slots and their pages.

    Attributes:
        sequences: number -> sequence, of all that wait or run.
        running: the slots as the last launched step leaves them.
        pool: who owns which page.
        tables: per slot, its pages in order.
        prompts: slot -> int32, the tokens to run before its next draw.
        draws: how each slot draws.
        swapped: number -> pages in host memory, of those that wait with their caches there.
    """

    def __init__(
        self,
        limits: Limits,
        meter: Meter,
        *,
        eos: int,
        keep: int = 0,
        reuse: Reuse | None = None,
        host_pages: int = 0,
    ):
        """Nobody waits or runs.

        Args:
            limits: sizes.
            meter: counts what happens here.
            eos: end-of-sequence id.
            keep: last prompt tokens that the decoder's layers run; 0: all.
            reuse: how prefixes are shared, or None.
            host_pages: pages of preempted sequences that host memory may hold.
        """
        self._limits, self._eos, self._keep, self._reuse = limits, eos, keep, reuse
        self._meter, self._host_pages = meter, host_pages
        self.sequences: dict[int, Sequence] = {}
        self.running = Running.empty(limits.slots)
        self.pool = PagePool(limits.pages)
        self.tables: list[list[int]] = [[] for _ in range(limits.slots)]
        self.prompts: dict[int, np.ndarray] = {}
        self.draws = Draws.greedy(limits.slots)
        self.swapped: dict[int, int] = {}
        self._number = 0
        self._waiting: dict[int, Waiting] = {}
        self._order: deque[int] = deque()  # numbers of `_waiting`, and of some that left it
        self._sort_at = 0.0
        self._deadlines: list[tuple[float, int]] = []
        self._aborted: set[int] = set()
        self._led: dict[int, list[Waiting]] = defaultdict(list)  # leader -> samples held back
        self._forks: dict[int, int] = {}  # sequence -> slot of its leader
        self._keys: dict[int, list[bytes]] = {}
        self._published = np.zeros(limits.slots, np.int64)  # full pages that were offered
        self._provenance: dict[int, Provenance] = {}  # sequence -> of the pages it writes

    # --- the queue ---------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many have no slot."""
        return len(self._waiting) + sum(map(len, self._led.values()))

    def add(self, sequence: Sequence, *, priority: int, deadline: float) -> int:
        """Queue a sequence; returns its number.

        A sample whose prompt another one is about to run waits for it and takes its caches over.
        """
        self._number += 1
        number, p = self._number, sequence.params
        self.sequences[number], sequence.number = sequence, number
        length = len(sequence.prompt)
        record = Waiting(
            request=number,
            prompt=length,
            limit=min(length + p.max_tokens, self._limits.max_model_len),
            arrival=time.monotonic(),
            deadline=deadline,
            priority=priority,
            replay=0 if self._reuse is None else self._reuse.replay,
            keep=self._keep if p.prompt_logprobs is None else 0,
            # Where every token is given there is nothing to guess.
            drafts=self._limits.drafts if p.golden_token_ids is None else 0,
        )
        if deadline < float("inf"):
            heapq.heappush(self._deadlines, (deadline, number))
        leader = sequence.leader
        if leader is not None and self.sequences.get(leader.number) is leader:
            self._led[leader.number].append(record)
        else:
            self._queue(record)
        return number

    def abort(self, number: int) -> None:
        """End a sequence with what it has; nothing happens if it has ended."""
        if number in self.sequences:
            self._aborted.add(number)

    def view(self, step: int, retired: int, lengths: Lengths | None = None) -> View:
        """What the plan of step `step` is made from; `retired` is the last step that was read.

        `lengths` decides how many drafts are verified; None: all.
        """
        now = time.monotonic()
        over = set(self._aborted)
        while self._deadlines and self._deadlines[0][0] <= now:
            over.add(heapq.heappop(self._deadlines)[1])
        self._release_led(over)
        free = int(np.count_nonzero(self.running.request < 0))
        line = self._line(now) if free else []
        for place, number in enumerate(line):
            self._look_up(number, next_in_line=place < free)
        records = [self._waiting[n] for n in line]
        records += [self._waiting[n] for n in over if n in self._waiting and n not in set(line)]
        return View(
            step=step,
            retired=retired,
            now=now,
            running=self.running,
            waiting=records,
            allocatable=self.pool.allocatable,
            pending=self.pool.pending,
            frees=lambda slot: self.pool.frees(self.tables[slot]),
            host_pages=self._host_pages - sum(self.swapped.values()),
            drafting=None
            if lengths is None
            else lambda slots, drafts, crowded: lengths.choice(
                step, slots, self.running.request[slots], drafts, crowded=crowded
            ),
            aborted=frozenset(self._aborted),
        )

    def _queue(self, record: Waiting) -> None:
        self._waiting[record.request] = record
        self._sort_at = 0.0

    def _line(self, now: float) -> list[int]:
        """Those that come next; a queue that nobody joins is not sorted for every step."""
        if now >= self._sort_at:
            order = admission_order(self._waiting.values(), now, self._limits)
            self._order, self._sort_at = deque(w.request for w in order), now + _SORTED_FOR
        while self._order and self._order[0] not in self._waiting:
            self._order.popleft()
        return list(islice((n for n in self._order if n in self._waiting), _IN_SIGHT))

    def _look_up(self, number: int, *, next_in_line: bool) -> None:
        """Note what is published of a waiting sequence's prefix, when it may be admitted now.

        What was noted for an earlier plan is forgotten: those pages may be others' by now.
        """
        w, reuse, limits = self._waiting[number], self._reuse, self._limits
        if reuse is None or w.swapped or w.fork:
            return
        if not next_in_line:
            if w.pages:
                self._waiting[number] = replace(w, pages=(), idle=0)
            return
        sequence = self.sequences[number]
        keys = self._grown_keys(number, min(sequence.length, sequence.reusable))
        found = self.pool.find(keys, reuse.accepts)[: limits.hit_pages]
        pages = tuple(found[: hit(len(found), w.prompt, w.replay, limits.page)[0] // limits.page])
        self._waiting[number] = replace(w, pages=pages, idle=self.pool.idle(pages))

    def _grown_keys(self, number: int, tokens: int) -> list[bytes]:
        """Keys of the full pages among the first `tokens` tokens of a sequence."""
        assert self._reuse is not None
        sequence, page = self.sequences[number], self._limits.page
        known = self._keys.get(number, [])
        if len(known) < tokens // page:
            known = extend_keys(known, self._reuse.root, sequence.tokens[:tokens], page=page)
            self._keys[number] = known
        return known[: tokens // page]

    def _release_led(self, over: set[int]) -> None:
        """Let samples go on whose prompt was just launched, or that will not be led any more."""
        run = self.running
        for leader, held in list(self._led.items()):
            slot = next(iter(np.flatnonzero(run.request == leader).tolist()), None)
            alone = leader not in self.sequences or leader in over
            ready = slot is not None and run.computed[slot] >= run.prompt[slot]
            if not alone and not ready:
                for w in held:
                    if w.request in over:
                        self._queue(w)
                self._led[leader] = [w for w in held if w.request not in over]
                continue
            del self._led[leader]
            for w in held:
                self._queue(w)
                # Once the leader has gone on, its windows are no longer those of the prompt's end.
                if not alone and slot is not None and run.computed[slot] == w.prompt:
                    pages = tuple(self.tables[slot][: (w.prompt - 1) // self._limits.page])
                    if len(pages) <= self._limits.hit_pages:
                        self._waiting[w.request] = replace(w, fork=True, pages=pages)
                        self._forks[w.request] = slot

    # --- decisions ---------------------------------------------------------------------------

    def settle(self, plan: Plan) -> tuple[Plan, list[Sequence], Moves]:
        """Take over a plan: the same with its pages, those that it ended, and what has to move."""
        over: list[Sequence] = []
        moves = Moves()
        self._aborted.clear()
        for number, slot, reason in plan.ended:
            if slot is not None:
                self._release(slot)
            if number in self.swapped:
                moves.dropped.append(number)
            over.append(self._forget(number))
            over[-1].interrupt(reason)
        for slot, mode in plan.preempted:
            number = int(self.running.request[slot])
            if mode == "swap":
                moves.saved.append((number, slot, list(self.tables[slot])))
                self.swapped[number] = len(self.tables[slot])
            self._queue(self.running.requeued(slot, self.sequences[number].length, mode))
            self._release(slot)
            self._meter.preempted += 1
        for number, error in plan.refused:
            over.append(self._forget(number))
            over[-1].fail(error)
        self.running = plan.running
        for number, slot in plan.admitted:
            self._admit(number, slot, int(plan.start[plan.slot == slot][0]))
        plan = planning.place(plan, self.pool.allocate(plan.fresh))
        for slot, place, page in plan.updates.tolist():
            assert place == len(self.tables[slot])
            self.tables[slot].append(page)
        for number, slot in plan.admitted:
            leader = self._forks.pop(number, None)
            if leader is not None:
                last = (len(self.prompts[slot]) - 1) // self._limits.page
                pages = self.tables[leader][last], self.tables[slot][last]
                moves.copied.append((leader, pages[0], slot, pages[1]))
            if number in self.swapped:
                moves.loaded.append((number, slot, self.tables[slot][: self.swapped.pop(number)]))
        # A fork is offered once: in the next step its leader has moved on.
        for number in self._forks:
            self._waiting[number] = replace(self._waiting[number], fork=False, pages=())
        self._forks.clear()
        return plan, over, moves

    def publish(self, plan: Plan) -> None:
        """Offer the pages that a step has filled, whose results were read, to later sequences."""
        if self._reuse is None:
            return
        end = plan.start + plan.count
        for part in np.flatnonzero(~plan.prefill).tolist():
            sequence = self.sequences.get(int(plan.running.request[plan.slot[part]]))
            end[part] = 0 if sequence is None else sequence.length - 1
        full = end // self._limits.page
        for part in np.flatnonzero(full > self._published[plan.slot]).tolist():
            slot, number = int(plan.slot[part]), int(plan.running.request[plan.slot[part]])
            sequence = self.sequences.get(number)
            if (
                sequence is None
                or sequence.error is not None
                or self.running.request[slot] != number
            ):
                continue
            begin, pages = int(self._published[slot]), int(full[part])
            keys = self._grown_keys(number, pages * self._limits.page)
            for place in range(begin, pages):
                parent = keys[place - 1] if place else self._reuse.root
                page = self.tables[slot][place]
                self.pool.publish(page, keys[place], parent, self._provenance[number])
            self._published[slot] = pages

    def stands(self, number: int, slot: int, counts: list[int]) -> None:
        """A sequence that decodes got its tokens; steps of `counts` of its rows are under way."""
        if self.running.request[slot] == number:
            self.running.known(slot, self.sequences[number].length - 1, counts)

    def end(self, number: int) -> None:
        """A sequence has its last token or failed: its slot and pages are free."""
        slots = np.flatnonzero(self.running.request == number)
        for slot in slots.tolist():
            self._release(slot)
        self.running = self.running.without(slots)
        self._forget(number)

    def _admit(self, number: int, slot: int, start: int) -> None:
        w, sequence, d = self._waiting.pop(number), self.sequences[number], self.draws
        held = int(self.running.write_from[slot]) // self._limits.page
        if held:
            self.pool.share(w.pages[:held])
            if not sequence.output:
                sequence.cached = start
            self._meter.cached_tokens += start
        self._published[slot] = held
        if self._reuse is not None and number not in self.swapped:
            leader = self._forks.get(number)
            if leader is None:
                made = self._reuse.written_after(self.pool.provenance(w.pages[:held]))
            else:
                made = self._provenance[int(self.running.request[leader])]
            self._provenance[number] = made
        p = sequence.params
        self.prompts[slot] = sequence.tokens
        d.temperature[slot], d.top_p[slot], d.top_k[slot] = p.temperature, p.top_p, p.top_k
        d.seed[slot] = split64(sequence.seed)
        eos = [] if p.ignore_eos else [self._eos]
        # The device looks for a few of them; the host sees the others one step later.
        stops = [*eos, *p.stop_token_ids][:STOP_IDS]
        d.stops[slot] = stops + [-1] * (STOP_IDS - len(stops))

    def _release(self, slot: int) -> None:
        self.pool.release(self.tables[slot], int(self.running.last[slot]))
        self.tables[slot] = []

    def _forget(self, number: int) -> Sequence:
        self._waiting.pop(number, None)
        self.swapped.pop(number, None)
        self._keys.pop(number, None)
        self._provenance.pop(number, None)
        self._forks.pop(number, None)
        return self.sequences.pop(number)
