"""The engine's loop: plan, launch, collect. The host plans a step while the device runs another.

In overlapped mode a step is launched before the results of the one before it are read: tokens go
from step to step on the device, and a sequence that has ended takes part in one step more, whose
result is dropped. In plain mode every step is read before the next is planned. Both modes write
the same tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.engine import plan as planning
from deepinfer_jax.engine.buckets import Draws, fit, pack, plan_buckets
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.plan import Limits, Plan, Running, View, Waiting
from deepinfer_jax.engine.planner import admission_order
from deepinfer_jax.engine.planner import plan as plan_step
from deepinfer_jax.engine.programs import Programs, Report
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.errors import DeepInferError, MemoryPlanError, RequestError
from deepinfer_jax.runner.compile import replicated
from deepinfer_jax.runner.layout import STOP_IDS, Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import Network, Params, StepOptions, init_state
from deepinfer_jax.sampling.philox import split64

Memory = Callable[[np.ndarray, int, int], tuple[np.ndarray, ...]]
_IN_SIGHT = 256  # waiting sequences that a plan considers


@dataclass
class Meter:
    """What the engine has done, for tables and figures.

    Attributes:
        prompt_tokens, output_tokens: counts; a prompt that is run again counts again.
        steps: launched.
        prefill_s, decode_s: seconds of steps with and without prompt rows, from one collection to
            the next; compiling is not part of them.
        wait_s, decode_wait_s: of those, seconds in which the host waited for the device.
        compile_s: seconds spent compiling.
        preempted: sequences that gave up their pages.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    decode_wait_s: float = 0.0
    compile_s: float = 0.0
    preempted: int = 0


@dataclass(frozen=True)
class _Flight:
    """A launched step: its plan, who draws in which part, and its results to come."""

    plan: Plan
    drawing: list[tuple[int, int]]  # (part, number of the sequence)
    out: Any


class Engine:
    """Runs sequences on one network; they join and leave between any two steps."""

    def __init__(
        self,
        network: Network,
        params: Params,
        mesh: Mesh,
        *,
        limits: Limits,
        options: StepOptions = StepOptions(),  # noqa: B008 - frozen
        overlap: bool = True,
        keep: int = 0,
        memory: Memory | None = None,
        report: Report | None = None,
        kept: Path | None = None,
    ):
        """Hold a network.

        Args:
            network, params, mesh: from the assembly.
            limits: sizes.
            options: samplers and bounded replay; its `top` is not used.
            overlap: launch a step before the one before it is read. Engram rows that the host
                looks up need the tokens, so with `memory` every step is read first.
            keep: last prompt tokens that the decoder's layers run; 0: all.
            memory: (token ids, start, stop) -> Engram rows, when the tables are off the device.
            report: called with a program's name and seconds after it was compiled.
            kept: folder of compiled programs, or None.
        """
        self._meter = Meter()
        self._network, self._params, self._limits = network, params, limits
        self._depth = 1 if overlap and memory is None else 0
        self._memory, self._keep = memory, keep
        self._mesh = mesh
        self._restart()
        self._programs = Programs(
            network,
            params,
            self._state,
            mesh,
            options,
            host_memory=memory is not None,
            report=report,
            kept=kept,
        )
        self._buckets = plan_buckets(limits, keep if options.truncate else 0)
        self._busy = False

    def _restart(self) -> None:
        """Nobody runs or waits, and all caches are empty."""
        limits = self._limits
        state = init_state(
            self._network,
            slots=limits.slots,
            positions=limits.table_pages * limits.page,
            pages=limits.pages,
        )
        self._state = jax.device_put(state, replicated(self._mesh))
        self._pool = PagePool(limits.pages)
        self._running = Running.empty(limits.slots)
        self._waiting: list[Waiting] = []
        self._sequences: dict[int, Sequence] = {}
        self._prompts: dict[int, np.ndarray] = {}  # slot -> tokens to run before its next draw
        self._tables: list[list[int]] = [[] for _ in range(limits.slots)]
        self._draws = Draws.greedy(limits.slots)
        self._flights: deque[_Flight] = deque()
        self._aborted: set[int] = set()
        self._number = self._step = self._retired = 0
        self._collected = time.perf_counter()

    @property
    def meter(self) -> Meter:
        """Counts and seconds so far."""
        return replace(self._meter, compile_s=self._programs.compile_s)

    @property
    def pool(self) -> PagePool:
        """Who owns which page."""
        return self._pool

    @property
    def late(self) -> list[tuple[Bucket, int]]:
        """Programs that were compiled while sequences ran."""
        return self._programs.late

    def prepare(self, prompts: tuple[int, ...], live: int, logprobs: int = 0) -> None:
        """Compile ahead what prompts of these lengths and `live` sequences will need.

        `logprobs` is how many top log-probs will be asked for.
        """
        top, most = _top(logprobs, self._network.config.vocab_size), self._limits.rows
        rows = {min(n, most) for n in prompts} | {n % most for n in prompts if n > most}
        rows |= {min(live, self._limits.slots)}
        kept = {n: min(n, self._keep + 1) if self._keep else n for n in rows if n}
        self._programs.prepare((fit(self._buckets, n, k), top) for n, k in sorted(kept.items()))

    def prepare_all(self, logprobs: int = 0) -> None:
        """Compile every program that can be needed with so many top log-probs."""
        top = _top(logprobs, self._network.config.vocab_size)
        self._programs.prepare((bucket, top) for bucket in self._buckets)

    def add(self, sequence: Sequence, *, priority: int = 0, deadline: float = float("inf")) -> int:
        """Queue a sequence; returns its number. `deadline` is on the clock of `time.monotonic`."""
        self._number += 1
        self._sequences[self._number] = sequence
        p = sequence.params
        length = len(sequence.prompt)
        self._waiting.append(
            Waiting(
                request=self._number,
                prompt=length,
                limit=min(length + p.max_tokens, self._limits.max_model_len),
                arrival=time.monotonic(),
                deadline=deadline,
                priority=priority,
                keep=self._keep,
            )
        )
        return self._number

    def abort(self, number: int) -> None:
        """End a sequence with what it has; nothing happens if it has ended."""
        if number in self._sequences:
            self._aborted.add(number)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sequences or self._flights)

    def step(self) -> list[Sequence]:
        """Launch the next step if there is one, take in results; returns who was touched."""
        plan = self._plan()
        touched = self._apply(plan)
        launched = plan.bucket is not None
        if launched:
            self._launch(plan)
        elif not self._flights and not touched and self._sequences:
            raise MemoryPlanError(
                f"{len(self._waiting)} sequences wait and none can run.",
                f"{self._pool.allocatable} of {self._limits.pages - 1} pages can be given.",
                "This is a fault of the planner; please report it with the sizes above.",
            )
        while len(self._flights) > (self._depth if launched else 0):
            touched += self._collect()
        return touched

    def run(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """Run all to their end; after each step, yields the sequences that got a token or ended.

        An error of one never touches another. Raises RequestError when another run has not ended.
        Closing the iterator aborts what is left; whatever breaks a step off, an interrupt among
        it, leaves an engine in which nobody runs.
        """
        if self._busy:
            raise RequestError(
                "The engine is in the middle of another call.",
                "Its slots belong to one call at a time, and a stream holds them until its end.",
                "Read the other stream to its end or close it, or pass all prompts in one call.",
            )
        self._busy = True
        try:
            mine = [self.add(sequence) for sequence in sequences]
            self._collected = time.perf_counter()
            try:
                while self.has_work:
                    touched = self.step()
                    if touched:
                        yield touched
            except GeneratorExit:
                self._aborted.update(n for n in mine if n in self._sequences)
                while self.has_work:
                    self.step()
                raise
        except GeneratorExit:
            raise
        except BaseException:
            # Between launch and collection the host's books and the device's state may disagree.
            self._restart()
            raise
        finally:
            self._busy = False

    def _plan(self) -> Plan:
        view = View(
            step=self._step + 1,
            retired=self._retired,
            now=time.monotonic(),
            running=self._running,
            waiting=self._next_in_line(),
            allocatable=self._pool.allocatable,
            pending=self._pool.pending,
            frees=lambda slot: self._pool.frees(self._tables[slot]),
            aborted=frozenset(self._aborted),
        )
        plan = plan_step(view, self._limits, self._buckets)
        self._aborted.clear()
        return plan

    def _next_in_line(self) -> list[Waiting]:
        """Those that the next steps could admit; the planner looks at a short list."""
        if len(self._waiting) <= _IN_SIGHT:
            return self._waiting
        return admission_order(self._waiting, time.monotonic(), self._limits)[:_IN_SIGHT]

    def _apply(self, plan: Plan) -> list[Sequence]:
        """Take the plan's decisions over, pages included; returns whom they ended."""
        over: list[Sequence] = []
        for number, slot, reason in plan.ended:
            if slot is not None:
                self._release(slot)
            over.append(self._forget(number))
            over[-1].interrupt(reason)
        for slot, mode in plan.preempted:
            number = int(self._running.request[slot])
            length = self._sequences[number].length
            self._waiting.append(self._running.requeued(slot, length, mode))
            self._release(slot)
            self._meter.preempted += 1
        for number, error in plan.refused:
            over.append(self._forget(number))
            over[-1].fail(error)
        self._running = plan.running
        for number, slot in plan.admitted:
            self._waiting = [w for w in self._waiting if w.request != number]
            self._admit(self._sequences[number], slot)
        return over

    def _admit(self, sequence: Sequence, slot: int) -> None:
        p, d = sequence.params, self._draws
        self._prompts[slot] = sequence.tokens
        self._tables[slot] = []
        d.temperature[slot], d.top_p[slot], d.top_k[slot] = p.temperature, p.top_p, p.top_k
        d.seed[slot] = split64(sequence.seed)
        eos = [] if p.ignore_eos else [self._network.config.eos_token_id]
        # The device looks for a few of them; the host sees the others one step later.
        stops = [*eos, *p.stop_token_ids][:STOP_IDS]
        d.stops[slot] = stops + [-1] * (STOP_IDS - len(stops))

    def _release(self, slot: int) -> None:
        self._pool.release(self._tables[slot], int(self._running.last[slot]))
        self._tables[slot] = []

    def _forget(self, number: int) -> Sequence:
        self._waiting = [w for w in self._waiting if w.request != number]
        return self._sequences.pop(number)

    def _launch(self, plan: Plan) -> None:
        bucket = plan.bucket
        assert bucket is not None
        plan = planning.place(plan, self._pool.allocate(plan.fresh))
        for slot, place, page in plan.updates.tolist():
            assert place == len(self._tables[slot])
            self._tables[slot].append(page)
        drawing = [
            (part, int(plan.running.request[plan.slot[part]]))
            for part in np.flatnonzero(plan.draws).tolist()
        ]
        ints, floats = pack(plan, self._draws, self._prompts, self._forced(plan, drawing))
        wanted = [self._sequences[n].params.logprobs or 0 for _, n in drawing]
        top = _top(max(wanted, default=0), self._network.config.vocab_size)
        before = self._programs.compile_s
        program = self._programs.get(bucket, top)
        self._collected += self._programs.compile_s - before  # compiling is no part of a step
        inputs: Any = StepInput(ints, floats, self._looked_up(plan))  # type: ignore[arg-type]
        self._state, out = program(self._params, self._state, inputs)
        for leaf in jax.tree.leaves(out):
            leaf.copy_to_host_async()
        self._step = plan.step
        self._meter.steps += 1
        self._meter.prompt_tokens += int(plan.count[plan.prefill].sum())
        self._flights.append(_Flight(plan, drawing, out))

    def _forced(self, plan: Plan, drawing: list[tuple[int, int]]) -> np.ndarray | None:
        forced = None
        for part, number in drawing:
            sequence, slot = self._sequences[number], plan.slot[part]
            if sequence.params.golden_token_ids is not None:
                # What is in flight has drawn already: the count comes from the plan.
                index = int(plan.start[part] + plan.count[part]) - len(sequence.prompt)
                if forced is None:
                    forced = np.full(self._limits.slots, -1, np.int32)
                forced[slot] = sequence.forced(index)
        return forced

    def _looked_up(self, plan: Plan) -> tuple[np.ndarray, ...] | None:
        """Engram rows of the step's tokens, when the host has the tables."""
        assert plan.bucket is not None
        found = self._programs.memory_rows(plan.bucket.rows)
        if found is None or self._memory is None:
            return None
        at = 0
        for slot, start, count in zip(plan.slot, plan.start, plan.count, strict=True):
            sequence = self._sequences[int(plan.running.request[slot])]
            if sequence.finished:
                at += int(count)
                continue  # its rows could not be read in an earlier chunk
            try:
                read = self._memory(sequence.tokens, int(start), int(start + count))
            except DeepInferError as error:
                sequence.fail(error)
            else:
                for layer, values in zip(found, read, strict=True):
                    layer[at : at + count] = values
            at += int(count)
        return found

    def _collect(self) -> list[Sequence]:
        """Read the oldest step in flight; returns who got a token or ended."""
        flight = self._flights.popleft()
        before = time.perf_counter()
        out = jax.device_get(flight.out)
        now = time.perf_counter()
        self._count(flight.plan, now - before, now)
        self._pool.retire(flight.plan.step)
        self._retired = flight.plan.step
        touched: list[Sequence] = []
        tokens, bad = out.draw.token.tolist(), out.draw.bad.tolist()
        raw = self._programs.logprobs == "raw"
        chosen = out.draw.raw_logprob if raw else out.draw.processed_logprob
        for part, number in flight.drawing:
            sequence = self._sequences.get(number)
            if sequence is None:
                continue  # it ended in the step before; what it drew here never was
            if not sequence.finished and bad[part]:
                sequence.fail(_not_finite(sequence))
            elif not sequence.finished:
                count = sequence.params.logprobs
                if count is not None:
                    ids, tops = out.top_ids[part, :count], out.top_logprobs[part, :count]
                    sequence.record(float(chosen[part]), ids, tops)
                sequence.append(
                    tokens[part],
                    eos=self._network.config.eos_token_id,
                    limit=self._limits.max_model_len,
                )
                self._meter.output_tokens += 1
            touched.append(sequence)
            if sequence.finished:
                self._end(number)
        return touched

    def _end(self, number: int) -> None:
        slots = np.flatnonzero(self._running.request == number)
        for slot in slots.tolist():
            self._release(slot)
        self._running = self._running.without(slots)
        self._forget(number)

    def _count(self, plan: Plan, waited: float, now: float) -> None:
        spent, self._collected = now - self._collected, now
        self._meter.wait_s += waited
        if plan.prefill.any():
            self._meter.prefill_s += spent
        else:
            self._meter.decode_s += spent
            self._meter.decode_wait_s += waited


def _top(wanted: int, vocab: int) -> int:
    """How many top log-probs a program returns so that `wanted` can be read off."""
    return 0 if not wanted else min(1 << (wanted - 1).bit_length(), vocab)


def _not_finite(sequence: Sequence) -> RequestError:
    return RequestError(
        f"The logits after token {sequence.length} hold NaN or infinity.",
        "No token can be drawn from such a distribution.",
        "Check the checkpoint's digest; if it is right, report the prompt.",
    )
