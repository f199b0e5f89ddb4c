"""The engine's loop: plan, launch, collect. The host plans a step while the device runs another.

In overlapped mode a step is launched before the results of the one before it are read: tokens go
from step to step on the device, and a sequence that has ended takes part in one step more, whose
result is dropped. In plain mode every step is read before the next is planned. Both modes write
the same tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.buckets import fit, pack, plan_buckets
from deepinfer_jax.engine.costs import measured, step_times
from deepinfer_jax.engine.engram_rows import Memory, look_up
from deepinfer_jax.engine.lane import Job, Lane
from deepinfer_jax.engine.meter import Meter, Snapshot, snapshot
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.plan import Limits, Plan
from deepinfer_jax.engine.planner import plan as plan_step
from deepinfer_jax.engine.prefix import Reuse
from deepinfer_jax.engine.programs import LateCompile, Programs, Report, top_count
from deepinfer_jax.engine.roster import Roster
from deepinfer_jax.engine.scores import scored_parts, take_scores
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.engine.tokens import DraftWatch, forced_tokens, take_tokens, tell_drafts
from deepinfer_jax.engine.transfer import Transfer
from deepinfer_jax.engine.varlen import Lengths
from deepinfer_jax.errors import MemoryPlanError, RequestError
from deepinfer_jax.model.flops import skipped_flops
from deepinfer_jax.runner.compile import replicated
from deepinfer_jax.runner.layout import Bucket, ProgramKey
from deepinfer_jax.runner.record import Recorder, StepRecord, replayed
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import Network, Params, StepOptions, init_state


@dataclass(frozen=True)
class _Flight:
    """A launched step: its plan, who draws in which part, and its results to come."""

    plan: Plan
    drawing: list[tuple[int, int]]  # (part, number of the sequence)
    scoring: list[tuple[int, int]]  # likewise
    out: Future[Any]


class Engine:
    """Runs sequences on one network; they join and leave between any two steps.

    Attributes:
        watch: called after every step of `run`.
        watch_drafts: called with every block of drafts that is verified.
        recorder: writes steps into files, so that they can be run again.
        acceptance: of drafts, place by place.
    """

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
        reuse: Reuse | None = None,
        host_pages: int = 0,
        memory: Memory | None = None,
        report: Report | None = None,
        kept: Path | None = None,
        late_compile: LateCompile = "warn",
    ):
        """Hold a network.

        Args:
            network, params, mesh: from the assembly.
            limits: sizes.
            options: samplers and bounded replay; its `top` is not used.
            overlap: launch a step before the one before it is read. Engram rows that the host
                looks up need the tokens, so with `memory` every step is read first.
            keep: last prompt tokens that the decoder's layers run; 0: all.
            reuse: how prefixes are shared; None: not at all.
            host_pages: pages of preempted sequences that host memory may hold; what does not fit
                is run again.
            memory: (token ids, start, stop) -> Engram rows, when the tables are off the device.
            report: called after each program is compiled.
            kept: folder of compiled programs, or None.
            late_compile: see `Programs`.
        """
        self._meter = Meter()
        self._lengths: Lengths | None = None
        self.acceptance = Acceptance.empty(limits.drafts)
        self.watch: Callable[[], None] | None = None
        self.watch_drafts: DraftWatch | None = None
        self.recorder: Recorder | None = None
        self._network, self._params, self._limits = network, params, limits
        self._depth = 1 if overlap and memory is None else 0
        self._memory, self._keep = memory, keep
        self._reuse, self._host_pages = reuse, host_pages
        self._mesh, self._options = mesh, options
        self._lane: Lane | None = None
        state = self._restart()
        self._programs = Programs(
            network,
            params,
            state,
            mesh,
            options,
            host_memory=memory is not None,
            report=report,
            kept=kept,
            late_compile=late_compile,
        )
        compact = keep if options.truncate == "compact" else 0
        self._buckets = plan_buckets(limits, compact, varlen=options.varlen)
        self._wide = limits.slots + 1
        self._row_flops = skipped_flops(network.config, 1)
        self._busy = False

    def _restart(self) -> Any:
        """Nobody runs or waits, and all caches are empty; returns the shapes of the state."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None  # its caches go before the new ones are made
        limits = self._limits
        state = init_state(
            self._network,
            slots=limits.slots,
            positions=limits.table_pages * limits.page,
            pages=limits.pages,
            drafts=limits.drafts,
            compared=self._options.rule != "coupled",
            backtrack=limits.backtrack,
        )
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._lane = Lane(jax.device_put(state, replicated(self._mesh)))
        self._roster = Roster(
            limits,
            self._meter,
            eos=self._network.config.eos_token_id,
            keep=self._keep,
            reuse=self._reuse,
            host_pages=self._host_pages,
        )
        self._transfer = Transfer(self._mesh, shapes)
        self._flights: deque[_Flight] = deque()
        self._step = self._retired = 0
        if self._lengths is not None:
            self._lengths.restart()
        self._collected = time.perf_counter()
        return shapes

    @property
    def meter(self) -> Meter:
        """Counts and seconds so far."""
        return replace(self._meter, compile_s=self._programs.compile_s)

    @property
    def pool(self) -> PagePool:
        """Who owns which page."""
        return self._roster.pool

    @property
    def programs(self) -> Programs:
        """What is compiled."""
        return self._programs

    @property
    def snapshot(self) -> Snapshot:
        """Counts and sizes between two steps."""
        pool = self._roster.pool
        return snapshot(
            self.meter,
            running=int((self._roster.running.request >= 0).sum()),
            waiting=self._roster.waiting,
            pages=(pool.pages - 1, pool.allocatable, pool.cached),
            compiled=self._programs.count,
            late=len(self._programs.late),
            acceptance=self.acceptance,
        )

    def prepare(
        self, prompts: tuple[int, ...], live: int, logprobs: int = 0, scored: int | None = None
    ) -> None:
        """Compile ahead what prompts of these lengths and `live` sequences will need.

        `logprobs` is how many top log-probs will be asked for, `scored` how many of prompts (None:
        no log-probs of prompts).
        """
        vocab, most = self._network.config.vocab_size, self._limits.rows
        top = top_count(logprobs, vocab)
        rows = {min(n, most) for n in prompts} | {n % most for n in prompts if n > most}
        kept = {n: min(n, self._keep + 1) if self._keep else n for n in rows if n}
        wanted = [ProgramKey(fit(self._buckets, n, k), top) for n, k in sorted(kept.items())]
        live, drafts = min(live, self._limits.slots), self._limits.drafts
        decode = live * (1 + drafts)
        wanted.append(ProgramKey(fit(self._buckets, decode, decode, live, drafts), top))
        if scored is not None:  # such prompts are never trimmed
            prompt, sizes = top_count(scored, vocab), {max(n, self._wide) for n in kept}
            wanted += [ProgramKey(fit(self._buckets, n, n), top, prompt) for n in sorted(sizes)]
        self._programs.prepare(wanted)

    def prepare_all(self, logprobs: Iterable[int] = (), scored: int | None = None) -> None:
        """Compile every program that can be needed without top log-probs, and with so many.

        With `scored`, also those that score prompts, with so many top log-probs of them. This ends
        the warm-up: a program that is missing later is late, see `Programs.get`.
        """
        vocab = self._network.config.vocab_size
        tops = sorted({0, *(top_count(count, vocab) for count in logprobs)})
        forms = [(bucket, None) for bucket in self._buckets]
        if scored is not None:
            prompt = top_count(scored, vocab)
            forms += [(bucket, prompt) for bucket in self._buckets if bucket.rows >= self._wide]
        self._programs.prepare(ProgramKey(b, top, prompt) for top in tops for b, prompt in forms)
        self._transfer.prepare()
        self._programs.seal()

    def measure(self, folder: Path | None, identity: Mapping[str, Any], ttl_s: float) -> None:
        """Measure what steps of each size take, or read it: from then on lengths follow it.

        Nobody may run. See `runner.cost_file.kept_or_measured` for the arguments.
        """

        def run(bucket: Bucket, ints: np.ndarray, floats: np.ndarray) -> None:
            program = self._programs.get(ProgramKey(bucket))
            inputs = StepInput(ints, floats)  # type: ignore[arg-type]
            out = self._run(lambda state: program(self._params, state, inputs))
            jax.block_until_ready(out.result())

        self._programs.prepare(map(ProgramKey, measured(self._buckets)))
        times = step_times(self._buckets, run, folder=folder, identity=identity, ttl_s=ttl_s)
        self._restart()
        self._lengths = Lengths(self._limits.slots, self._limits.drafts, times)

    def replay(self, recorded: StepRecord) -> StepRecord:
        """Run a recorded step again, on its own state and not on the engine's."""
        program = self._programs.get(recorded.key)
        return replayed(recorded, program, self._params, self._programs.state_shapes)

    def add(self, sequence: Sequence, *, priority: int = 0, deadline: float = float("inf")) -> int:
        """Queue a sequence; returns its number. `deadline` is on the clock of `time.monotonic`."""
        return self._roster.add(sequence, priority=priority, deadline=deadline)

    def abort(self, number: int) -> None:
        """End a sequence with what it has; nothing happens if it has ended."""
        self._roster.abort(number)

    @property
    def drafts(self) -> int:
        """Tokens of a sequence that a step verifies at most."""
        return self._limits.drafts

    @property
    def measured(self) -> bool:
        """Whether lengths of verification follow what steps take."""
        return self._lengths is not None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._roster.sequences or self._flights)

    def step(self) -> list[Sequence]:
        """Launch the next step if there is one, take in results; returns who was touched."""
        roster = self._roster
        plan, touched = self._settle(self._plan())
        launched = plan.bucket is not None
        if launched:
            self._launch(plan)
        elif not self._flights and not touched and not plan.preempted and roster.sequences:
            raise MemoryPlanError(
                f"{roster.waiting} sequences wait and none can run.",
                f"{roster.pool.allocatable} of {self._limits.pages - 1} pages can be given.",
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
                    if self.watch is not None:
                        self.watch()
                    if touched:
                        yield touched
            except GeneratorExit:
                for number in mine:
                    self.abort(number)
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
        view = self._roster.view(self._step + 1, self._retired, self._lengths)
        return plan_step(view, self._limits, self._buckets)

    def _settle(self, plan: Plan) -> tuple[Plan, list[Sequence]]:
        """Take the plan over, moves on the device included; with its pages, and whom it ended."""
        plan, over, moves = self._roster.settle(plan)
        if moves.any:
            self._run(lambda state: (self._transfer.run(state, moves), None))
        return plan, over

    def _run(self, job: Job) -> Future[Any]:
        assert self._lane is not None
        return self._lane.run(job)

    def _launch(self, plan: Plan) -> None:
        bucket = plan.bucket
        assert bucket is not None
        roster = self._roster
        drawing = [
            (part, int(plan.running.request[plan.slot[part]]))
            for part in np.flatnonzero(plan.draws).tolist()
        ]
        scoring, score_from = scored_parts(plan, roster.sequences)
        if scoring:  # of small buckets there is no program that scores
            rows = max(bucket.rows, self._wide)
            bucket = fit(self._buckets, rows, bucket.decoder_rows, bucket.parts, bucket.drafts)
            plan = replace(plan, bucket=bucket)
        forced = forced_tokens(plan, drawing, roster.sequences)
        ints, floats = pack(plan, roster.draws, roster.prompts, forced, score_from)
        vocab, of = self._network.config.vocab_size, roster.sequences
        top = top_count(max((of[n].params.logprobs or 0 for _, n in drawing), default=0), vocab)
        asked = [of[n].params.prompt_logprobs or 0 for _, n in scoring]
        key = ProgramKey(bucket, top, top_count(max(asked), vocab) if asked else None)
        before = self._programs.compile_s
        program = self._programs.get(key)
        self._collected += self._programs.compile_s - before  # compiling is no part of a step
        rows = self._programs.memory_rows(bucket.rows)
        if rows is not None and self._memory is not None:
            rows = look_up(plan, of, self._memory, rows)
        inputs: Any = StepInput(ints, floats, rows)  # type: ignore[arg-type]
        if self.recorder is not None:
            program = self.recorder.around(program, key)

        def launch(state: Any) -> tuple[Any, Any]:
            state, out = program(self._params, state, inputs)
            for leaf in jax.tree.leaves(out):
                leaf.copy_to_host_async()
            return state, out

        out = self._run(launch)
        self._step = plan.step
        if self._lengths is not None:
            self._lengths.launched(plan)
        self._meter.steps += 1
        self._meter.prompt_tokens += int(plan.count[plan.prefill].sum())
        if bucket.decoder_rows < bucket.rows:
            skipped = np.clip(plan.running.keep_from[plan.slot] - plan.start, 0, plan.count)
            self._meter.skipped_rows += int(skipped.sum())
            self._meter.skipped_flops += int(skipped.sum()) * self._row_flops
        self._flights.append(_Flight(plan, drawing, scoring, out))

    def _collect(self) -> list[Sequence]:
        """Read the oldest step in flight; returns who got a token or ended."""
        flight = self._flights.popleft()
        before = time.perf_counter()
        out = jax.device_get(flight.out.result())
        now = time.perf_counter()
        took = now - self._collected
        self._meter.count(bool(flight.plan.prefill.any()), took, now - before)
        if self._lengths is not None:
            self._lengths.observe(flight.plan, took)
        self._collected = now
        self._roster.pool.retire(flight.plan.step)
        self._retired = flight.plan.step
        touched: list[Sequence] = []
        take_scores(flight.plan, flight.scoring, out.prompt, self._roster.sequences)
        raw, eos = self._options.logprobs == "raw", self._network.config.eos_token_id
        limit = self._limits.max_model_len
        for part, number in flight.drawing:
            if (sequence := self._roster.sequences.get(number)) is None:
                continue  # it ended in the step before; what it drew here never was
            taken = take_tokens(sequence, out, part, raw=raw, eos=eos, limit=limit)
            self._meter.output_tokens += taken
            if self.watch_drafts is not None:
                tell_drafts(sequence, out, part, self._options, self.watch_drafts)
            slot = int(flight.plan.slot[part])
            offered, accepted = int(out.offered[part]), int(out.accepted[part])
            self.acceptance.count(offered, accepted)
            self._meter.drafted += offered
            self._meter.accepted += accepted
            if self._lengths is not None:
                self._lengths.read(flight.plan, part, number, out)
            if not flight.plan.prefill[part]:
                self._roster.stands(number, slot, self._under_way(slot))
            touched.append(sequence)
        self._roster.publish(flight.plan)
        for sequence in touched:
            if sequence.finished:
                self._roster.end(sequence.number)
        return touched

    def _under_way(self, slot: int) -> list[int]:
        """Rows of a slot in the steps that were launched and not read."""
        return [
            int(count)
            for flight in self._flights
            for count in flight.plan.count[flight.plan.slot == slot]
        ]
