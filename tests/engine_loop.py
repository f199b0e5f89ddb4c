"""A host loop around the planner with a device of dictionaries, which checks what it is given.

The device keeps every token that a row writes, so a wrong page, a page that is given out too early
or a read-only page that is written shows as a wrong token in the prefix of some row.
"""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from deepinfer_jax.engine.buckets import plan_buckets
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.plan import Limits, Plan, Running, View, Waiting, place
from deepinfer_jax.engine.planner import admission_order, plan
from deepinfer_jax.engine.prefix import Provenance, accepts, extend_keys, hit, root_key

ROOT = root_key(b"test", b"")
ACCEPT = accepts("exact")


def limits(**changed) -> Limits:
    sizes = dict(slots=3, rows=8, pages=12, page=4, max_model_len=64, table_pages=16, updates=24)
    return Limits(**{**sizes, **changed})


@dataclass
class Request:
    """What becomes of a request: its outcome is "stop", "abort", "deadline" or "refused"."""

    number: int
    prompt: list[int]
    limit: int
    stop: int  # total length at which the model ends it
    output: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    outcome: str | None = None
    published: int = 0
    preemptions: int = 0
    swapped: list[dict[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def token(self, position: int) -> int:
        """What the model writes; the same whenever it is drawn again."""
        known = position < len(self.prompt)
        return self.prompt[position] if known else 1000 * self.number + position


class Loop:
    """Runs plans; `depth` steps are under way while the next is planned."""

    def __init__(self, sizes: Limits, depth: int = 1, replay: int = 4, host_pages: int = 0):
        self.limits, self.depth, self.replay = sizes, depth, replay
        self.host_pages = host_pages
        self.buckets = plan_buckets(sizes)
        self.pool = PagePool(sizes.pages)
        self.running = Running.empty(sizes.slots)
        self.table = np.zeros((sizes.slots, sizes.table_pages), np.int32)
        self.waiting: dict[int, Waiting] = {}
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.flight: deque[tuple[Plan, dict[int, bool]]] = deque()
        self.memory: dict[int, dict[int, int]] = {p: {} for p in range(sizes.pages)}
        self.length = np.zeros(sizes.slots, np.int64)
        self.done = np.ones(sizes.slots, bool)
        self.step_id, self.retired, self.now = 0, 0, 0.0
        self.plans: list[Plan] = []
        self.behind: int | None = None  # the first that needs a page, if it had to wait,
        self.waited = self.longest = 0  # and for how many steps

    def add(self, prompt, output, stop=None, priority=0, deadline=np.inf):
        number, limit = len(self.requests), len(prompt) + output
        self.requests[number] = Request(number, list(prompt), limit, stop or limit)
        self.waiting[number] = Waiting(
            request=number,
            prompt=len(prompt),
            limit=limit,
            arrival=self.now,
            deadline=deadline,
            priority=priority,
            replay=self.replay,
        )
        return number

    def pages_of(self, slot):
        return self.table[slot, : self.running.allocated[slot]].tolist()

    def slot_of(self, number):
        found = np.flatnonzero(self.running.request == number)
        return int(found[0]) if len(found) else None

    def step(self) -> Plan:
        """Plan, launch, and take in the results of the step `depth` before."""
        self.step_id += 1
        self.now += 1.0
        self.look_up()
        view = View(
            step=self.step_id,
            retired=self.retired,
            now=self.now,
            running=self.running,
            waiting=list(self.waiting.values()),
            allocatable=self.pool.allocatable,
            pending=self.pool.pending,
            frees=lambda slot: self.pool.frees(self.pages_of(slot)),
            host_pages=self.host_pages,
            aborted=frozenset(self.aborted),
        )
        made = plan(view, self.limits, self.buckets)
        self.check(view, made)
        self.apply(made)
        if made.bucket is None:
            self.step_id -= 1
        while self.flight and (len(self.flight) > self.depth or made.bucket is None):
            self.collect()
        self.pool.check([self.pages_of(s) for s in np.flatnonzero(self.running.request >= 0)])
        return made

    def look_up(self):
        """Find the prefixes of those that come next."""
        for w in admission_order(self.waiting.values(), self.now, self.limits)[:4]:
            request, page = self.requests[w.request], self.limits.page
            request.keys = extend_keys(request.keys, ROOT, request.tokens, page=page)
            found = self.pool.find(request.keys, ACCEPT)[: self.limits.hit_pages]
            kept = hit(len(found), w.prompt, w.replay, page)[0] // page
            pages = () if w.swapped else tuple(found[:kept])
            self.waiting[w.request] = replace(w, pages=pages, idle=self.pool.idle(pages))

    def apply(self, made: Plan):
        for number, slot, reason in made.ended:
            self.requests[number].outcome = reason
            if slot is None:
                self.host_pages += len(self.requests[number].swapped)
                del self.waiting[number]
            else:
                self.pool.release(self.pages_of(slot), int(self.running.last[slot]))
        for number, _ in made.refused:
            self.requests[number].outcome = "refused"
            del self.waiting[number]
        for slot, mode in made.preempted:
            request = self.requests[int(self.running.request[slot])]
            record = self.running.requeued(slot, len(request.tokens), mode)
            self.waiting[record.request] = record
            request.preemptions += 1
            request.published = 0
            if mode == "swap":
                request.swapped = [dict(self.memory[p]) for p in self.pages_of(slot)]
                self.host_pages -= len(request.swapped)
                assert self.host_pages >= 0
            self.pool.release(self.pages_of(slot), int(self.running.last[slot]))
        for number, slot in made.admitted:
            pages = self.waiting.pop(number).pages
            kept = made.running.write_from[slot] // self.limits.page
            assert kept == len(pages)
            self.pool.share(pages)
        made = place(made, self.pool.allocate(made.fresh))
        filled = self.running.allocated.copy()
        filled[[slot for _, slot in made.admitted]] = 0
        for slot, at, number in made.updates.tolist():
            assert at == filled[slot] and number
            self.table[slot, at] = number
            filled[slot] += 1
        live = made.running.request >= 0
        assert (filled == made.running.allocated)[live].all()
        for number, slot in made.admitted:
            request = self.requests[number]
            self.length[slot] = made.start[made.slot == slot][0]
            self.done[slot] = False
            for page, content in zip(self.table[slot], request.swapped, strict=False):
                self.memory[int(page)] = content
            self.host_pages += len(request.swapped)
            request.swapped = []
        self.running = made.running
        self.plans.append(made)
        if made.bucket is not None:
            self.flight.append((made, self.launch(made)))

    def launch(self, made: Plan) -> dict[int, bool]:
        """The device: request -> whether it ends, for every part that draws."""
        page, drawn = self.limits.page, {}
        for slot, start, count, prefill, draws in zip(
            made.slot, made.start, made.count, made.prefill, made.draws, strict=True
        ):
            number = int(made.running.request[slot])
            request = self.requests[number]
            if self.done[slot]:
                assert not prefill
                continue
            assert self.length[slot] == start
            end, pages = int(start + count), self.table[slot].tolist()
            for position in range(start, end):
                if position >= made.running.write_from[slot]:
                    written = request.token(position)
                    self.memory[pages[position // page]][position % page] = written
            for position in range(end):
                read = self.memory[pages[position // page]].get(position % page)
                assert pages[position // page] and read == request.token(position)
            self.length[slot] = end
            if draws:
                self.done[slot] = end + 1 >= min(request.stop, request.limit)
                drawn[number] = bool(self.done[slot])
        return drawn

    def collect(self):
        """Take in the results of the oldest step under way."""
        made, drawn = self.flight.popleft()
        self.retired = made.step
        self.pool.retire(made.step)
        over = []
        for number, ended in drawn.items():
            request, slot = self.requests[number], self.slot_of(number)
            if slot is None:  # aborted while it was under way
                continue
            request.output.append(request.token(len(request.tokens)))
            self.publish(request, slot)
            if ended:
                request.outcome = "stop"
                self.pool.release(self.pages_of(slot), int(self.running.last[slot]))
                over.append(slot)
        self.running = self.running.without(over)

    def publish(self, request: Request, slot: int):
        """The full pages of what is committed: all but the last token."""
        page = self.limits.page
        request.keys = extend_keys(request.keys, ROOT, request.tokens[:-1], page=page)
        for number in range(request.published, len(request.keys)):
            owner, parent = int(self.table[slot, number]), request.keys[number - 1]
            if owner not in self.pool.find(request.keys[: number + 1], ACCEPT):
                parent = parent if number else ROOT
                self.pool.publish(owner, request.keys[number], parent, Provenance())
        request.published = len(request.keys)

    def check(self, view: View, made: Plan):
        """What every plan must hold, worked out from the view alone."""
        sizes, run, page = self.limits, view.running, self.limits.page
        count = made.count
        assert len(set(made.slot.tolist())) == len(made.slot) and (count > 0).all()
        assert (run.last <= made.running.last).all()
        if made.bucket is not None:
            assert count.sum() <= made.bucket.rows <= sizes.rows
            assert len(made.slot) <= made.bucket.parts
            assert all(b.rows < count.sum() for b in self.buckets if b < made.bucket)
        assert len(made.updates) <= sizes.updates
        assert (np.diff(made.prefill.astype(int)) >= 0).all(), "decode parts come first"
        end, prompt = made.start + count, made.running.prompt[made.slot]
        assert ((end % 2 == 0) | (end == prompt))[made.prefill].all()
        assert (made.draws == (end >= prompt)).all()
        assert (end <= made.running.limit[made.slot] - 1).all()
        assert (made.running.allocated[made.slot] * page >= end).all()

        over = {slot for _, slot, _ in made.ended}
        gone = {slot for slot, _ in made.preempted}
        decode = {
            s
            for s in range(sizes.slots)
            if run.request[s] >= 0 and run.prompt[s] <= run.computed[s] < run.limit[s] - 1
        } - over
        absent = decode - set(made.slot.tolist()) - gone
        needy = {s for s in decode if run.computed[s] >= run.allocated[s] * page}
        if absent:
            owed = [
                -(-(run.limit[s] - 1) // page) - run.allocated[s]
                for s in range(sizes.slots)
                if run.request[s] >= 0 and run.preempted[s] >= sizes.strikes and s not in over
            ]
            assert len(needy) + sum(owed) > view.allocatable, "a row is left out without need"
            assert len(absent - needy) <= 1, "only one sequence pauses for another"
            assert (run.preempted[list(absent)] < sizes.strikes).all(), "its pages are set aside"
            assert not made.admitted
        able = [
            s
            for s in range(sizes.slots)
            if run.request[s] >= 0 and run.preempted[s] < sizes.strikes and s not in over
        ]
        frees = [s for s in able if view.frees(s)]
        if needy:
            key = lambda s: (run.preempted[s] < sizes.strikes, run.priority[s], run.order[s])  # noqa: E731
            first = min(needy, key=key)
            who = int(run.request[first]) if first in absent and frees else None
            again = who is not None and who == self.behind
            self.behind, self.waited = who, 1 + self.waited if again else 1
            self.longest = max(self.longest, self.waited if who is not None else 0)
            most = 2 if view.pending else 1
            assert not again or self.waited <= most, "the first that needs a page waits again"

        assert len(made.preempted) <= 1
        for slot, _ in made.preempted:
            assert run.last[slot] <= view.retired, "a step of it is under way"
            assert run.preempted[slot] < sizes.strikes
            assert needy and not made.admitted
            worst = max(frees or able, key=lambda s: (run.priority[s], run.order[s]))
            assert slot == worst
        queue = [w for w in view.waiting if w.request not in {n for n, s, _ in made.ended}]
        order = [w.request for w in admission_order(queue, view.now, sizes)]
        taken = {n for n, _ in (*made.admitted, *made.refused)}
        assert set(order[: len(taken)]) == taken, "somebody is overtaken"
        for _, slot in made.admitted:
            assert run.request[slot] < 0 or slot in over
            assert run.last[slot] <= view.retired
        idle = sum(w.idle for w in queue if w.request in dict(made.admitted))
        freed = sum(view.frees(s) for s in gone)
        assert made.fresh <= view.allocatable + freed - idle, "pages are overcommitted"

    def drain(self):
        """Run until nothing is left; a step that does nothing with none under way fails."""
        most = 200 + 20 * sum(r.limit for r in self.requests.values())
        for _ in range(most):
            if not self.waiting and not (self.running.request >= 0).any() and not self.flight:
                return
            idle = not self.flight
            made = self.step()
            assert made.bucket or made.ended or made.refused or not idle, "nothing goes on"
        raise AssertionError(f"not done after {most} steps")

    def check_end(self):
        for request in self.requests.values():
            assert request.outcome is not None, f"request {request.number} is lost"
            if request.outcome == "stop":
                assert len(request.tokens) == min(request.stop, request.limit)
                expected = [request.token(i) for i in range(len(request.tokens))]
                assert request.tokens == expected
        self.pool.check([])
        assert self.pool.allocatable == self.limits.pages - 1
