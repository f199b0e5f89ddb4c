"""How long the device is idle between two step programs, from the profiler's trace.

`python -m deepinfer_jax.bench.step_gap [--model nano | --config slice] --sequences 64 --steps 64`

All sequences decode, so every step is the same program. Each loop runs a warm-up, then steps
without the profiler, whose host time is taken apart, then steps with it: the gap is what lies
between the end of one program and the start of the next, copies included. A config that describes
a network runs with random weights.
"""

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.profiler import ProfileData, ProfileOptions

from deepinfer_jax import settings
from deepinfer_jax.assembly import Assembled
from deepinfer_jax.bench.device_trace import Operation, Span, executions, newest, operations
from deepinfer_jax.bench.device_trace import overlap as covered
from deepinfer_jax.bench.random_network import random_network
from deepinfer_jax.engine.admission import Admission
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.plan import Limits
from deepinfer_jax.engine.sequence import Sequence as Sample
from deepinfer_jax.errors import ConfigError, RequestError
from deepinfer_jax.llm import LLM
from deepinfer_jax.ops.device import devices
from deepinfer_jax.report.plan import nbytes
from deepinfer_jax.sampling_params import SamplingParams

LOG = logging.getLogger("deepinfer_jax.bench")
_WARM_UP, _PAGE = 8, 128


class _Unread:
    """The text of a network that has no tokenizer."""

    stopped = None

    def push(self, token: int) -> None:
        """Leave the token alone."""

    def finish(self, reason: str) -> None:
        """There is nothing to release."""


class _Clocked:
    """Step programs whose calls are timed and counted."""

    def __init__(self, programs: Any, clock: Callable[[str], Any]):
        self._programs, self._clock = programs, clock
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)

    def get(self, key: Any) -> Callable[..., Any]:
        program = self._programs.get(key)

        def run(*given: Any) -> Any:
            self.calls += 1
            with self._clock("call"):
                return program(*given)

        return run


class TimedEngine(Engine):
    """The engine with a stopwatch on the parts of a step, and either loop on the same programs.

    Attributes:
        spent: seconds by part: plan, settle, launch, take (of them what the meter counts as
            waiting), and call, the program's own launch in its thread.
    """

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.spent: dict[str, float] = {
            part: 0.0 for part in ("plan", "settle", "launch", "call", "take")
        }
        self._clocked = _Clocked(self._programs, self._clock)
        self._programs = cast(Any, self._clocked)

    @property
    def calls(self) -> int:
        """Step programs that were called."""
        return self._clocked.calls

    def choose(self, overlap: bool) -> None:
        """Run in overlapped or plain mode from now on; nothing may be in flight."""
        assert not self.has_work
        self._depth = int(overlap)

    def wait(self) -> None:
        """Wait until the device has run all that was launched."""
        assert self._lane is not None
        self._lane.wait()

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent[part] += time.perf_counter() - start

    def _plan(self) -> Any:
        with self._clock("plan"):
            return super()._plan()

    def _settle(self, plan: Any) -> Any:
        with self._clock("settle"):
            return super()._settle(plan)

    def _launch(self, plan: Any) -> None:
        with self._clock("launch"):
            super()._launch(plan)

    def _collect(self) -> Any:
        with self._clock("take"):
            return super()._collect()


@dataclass(frozen=True)
class Host:
    """What steps cost the host, microseconds a step: all of it, and by part.

    Parts: plan; settle (ends, admissions, pages); pack (arrays of the step, results
    asked for); wait (for results); collect (results taken in); rest; and beside them, in a thread
    of its own, call (inputs copied, program launched).
    """

    step: float
    parts: dict[str, float]

    @property
    def work(self) -> float:
        """Microseconds a step in which the host does not wait for the device."""
        return self.step - self.parts["wait"]


def host_times(engine: TimedEngine, run: Callable[[], None], steps: int) -> Host:
    """Time `run`, which makes `steps` steps."""
    before, waited = dict(engine.spent), engine.meter.wait_s
    start = time.perf_counter()
    run()
    total = time.perf_counter() - start
    spent = {part: engine.spent[part] - before[part] for part in before}
    wait = engine.meter.wait_s - waited
    parts = {
        "plan": spent["plan"],
        "settle": spent["settle"],
        "pack": spent["launch"],
        "call": spent["call"],
        "wait": wait,
        "collect": spent["take"] - wait,
    }
    parts["rest"] = total - sum(parts.values()) + parts["call"]  # the call is not this thread's
    return Host(1e6 * total / steps, {part: 1e6 * s / steps for part, s in parts.items()})


def gaps(runs: Sequence[Span], copies: Sequence[Operation]) -> dict[str, Any]:
    """The figures of consecutive runs of one program, microseconds; at least two runs.

    step_us, device_us, gap_us: medians of the time from start to start, of the run itself and of
    what lies between two runs. gap_p90_us: the gap that nine of ten do not exceed. copy_us: median
    part of the gap in which a copy runs, None when the device writes no copies. share: all gaps
    over all steps. share_of_medians: gap_us over step_us.
    """
    pairs = list(zip(runs, runs[1:], strict=False))
    steps = [(b.start - a.start) / 1e3 for a, b in pairs]
    between = [(b.start - a.end) / 1e3 for a, b in pairs]
    copied = [covered(Span(a.end, b.start), copies) / 1e3 for a, b in pairs]
    step, gap = statistics.median(steps), statistics.median(between)
    return {
        "steps": len(runs),
        "step_us": step,
        "device_us": statistics.median((run.end - run.start) / 1e3 for run in runs),
        "gap_us": gap,
        "gap_p90_us": sorted(between)[-(-9 * len(between) // 10) - 1],
        "copy_us": statistics.median(copied) if copies else None,
        "share": sum(between) / sum(steps),
        "share_of_medians": gap / step,
    }


def read(file: Path, steps: int, module: str) -> dict[str, Any]:
    """The figures of `gaps` from a trace during which `steps` steps ran."""
    ops = operations(ProfileData.from_file(str(file)))
    return gaps(executions(ops, steps, module), [op for op in ops if op.copy])


def traced(
    engine: TimedEngine, run: Callable[[], None], folder: Path, module: str
) -> dict[str, Any]:
    """The figures of `gaps` while `run` makes its steps under the profiler."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    # On a CPU the operations are the host's, and are written from level 2 on.
    options.host_tracer_level = 2 if devices()[0].platform == "cpu" else 1
    engine.wait()
    before = engine.calls
    with jax.profiler.trace(str(folder), profiler_options=options):
        run()
        engine.wait()
    return read(newest(folder), engine.calls - before, module)


def measure(
    engine: TimedEngine, samples: Sequence[Sample], steps: int, folder: Path, module: str
) -> dict[str, Any]:
    """One loop's figures; `samples` decode all the time and are dropped at the end.

    Raises the error of a sequence that cannot run, and ConfigError as `executions`.
    """
    stepped = cast(Generator[list[Sample]], engine.run(samples))

    def run(count: int) -> None:
        for _ in range(count):
            touched = next(stepped)
            ended = [sample for sample in touched if sample.finished]
            if ended or len(touched) != len(samples):
                errors = [sample.error for sample in ended if sample.error is not None]
                raise errors[0] if errors else _interrupted(touched, ended, len(samples))

    try:
        run(_WARM_UP)
        host = host_times(engine, lambda: run(steps), steps)
        LOG.info(
            f"without the profiler {host.step:.0f} us a step; the host works for {host.work:.0f} "
            f"of them: {', '.join(f'{part} {us:.0f}' for part, us in host.parts.items())}"
        )
        figures = traced(engine, lambda: run(steps), folder, module)
    finally:
        stepped.close()
    return figures | {
        "untraced_step_us": host.step,
        "host_us": host.work,
        "host_parts_us": host.parts,
    }


def _interrupted(touched: list[Sample], ended: list[Sample], count: int) -> RequestError:
    return RequestError(
        f"In one step {len(touched)} of {count} sequences got a token, and {len(ended)} ended.",
        "A step that does less than the others cannot be compared with them.",
        "Give the engine memory for all sequences, or measure fewer steps.",
    )


@dataclass(frozen=True)
class Opened:
    """A network, and its engine's admission; None for a network without a tokenizer."""

    net: Assembled
    admission: Admission | None

    def samples(self, count: int, tokens: int) -> list[Sample]:
        """Sequences of one prompt token: their prompts run in the program that decodes them."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ids = [[3 + n % 5] for n in range(count)]
        if self.admission is not None:
            requests = self.admission.prompts(None, params, ids, None)
            for error in filter(None, (request.error for request in requests)):
                raise error
            return [sample for request in requests for sample in request.samples]
        text: Any = _Unread()
        return [Sample(n, 0, np.array(p, np.int32), params, n, text) for n, p in enumerate(ids)]


def open_network(model: str | None, config: str | None, overrides: Sequence[str]) -> Opened:
    """A stored model's network, or that of a config with random weights."""
    if config is not None:
        asked = settings.load(config, overrides)
        if asked.network is not None:
            return Opened(random_network(asked.network, asked.engine), None)
        llm = LLM(config=config, overrides=overrides)
    else:
        llm = LLM(model or "nano", overrides=overrides)
    net = llm.assembled
    return Opened(net, Admission(llm.tokenizer, llm.config, net.positions))


def open_engine(net: Assembled, sequences: int, length: int) -> TimedEngine:
    """An engine whose steps of `sequences` rows are its only bucket that is needed."""
    if net.tables:
        raise ConfigError(
            "The Engram tables of this network are not on the device.",
            "Their rows are looked up by the host, so steps cannot overlap.",
            "Use engine.engram=device.",
        )
    pages = -(-net.positions // _PAGE)
    if length > net.positions:
        raise ConfigError(
            f"The sequences grow to {length} tokens; the engine holds {net.positions}.",
            "All of them must decode until the last step is measured.",
            f"Measure fewer steps, or set engine.max_model_len to at least {length}.",
        )
    limits = Limits(
        slots=sequences,
        rows=sequences + 1,
        pages=1 + sequences * pages,
        max_model_len=net.positions,
        table_pages=pages,
        updates=sequences + 1 + pages,
    )
    return TimedEngine(net.network, net.params, net.mesh, limits=limits)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return number


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The command; its table goes to the log, with --json its figures as a last line."""
    parser = argparse.ArgumentParser(description="Idle time of the device between step programs.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a stored model (nano)")
    what.add_argument("--config", help="an engine config; one with a network has random weights")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="set")
    parser.add_argument("--sequences", type=_at_least(1), default=64)
    parser.add_argument("--steps", type=_at_least(3), default=64, help="of each measurement")
    parser.add_argument("--module", default="", help="regular expression of the step's module")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="keep the traces there")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a kept trace of --steps steps")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    figures = _kept(given) if given.read is not None else _measured(given)
    if given.json:
        LOG.info(json.dumps(figures))
    return figures


def _kept(given: argparse.Namespace) -> dict[str, Any]:
    figures = read(given.read, given.steps, given.module)
    _tell(str(given.read), figures)
    return figures


def _measured(given: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    # A sequence takes part in one step more than was measured, and must not end there.
    tokens = _WARM_UP + 2 * given.steps + 4
    overrides = [f"engine.max_num_seqs={given.sequences}", *given.set]
    opened = open_network(given.model, given.config, overrides)
    net = opened.net
    engine = open_engine(net, given.sequences, 1 + tokens)
    loaded = time.perf_counter() - begin
    weights = replace(net.params, token_map=None, rope_plain=None, rope_compressed=None)
    figures: dict[str, Any] = {
        "network": given.config or given.model or "nano",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(weights)),
        "weights_gb": nbytes(weights) / 1e9,
        "arithmetic": net.network.arithmetic.name,
        "positions": net.positions,
        "sequences": given.sequences,
        "machine": f"{platform.machine()}, {devices()[0].device_kind}",
        "jax": jax.__version__,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, overlap in (("plain", False), ("overlapped", True)):
            engine.choose(overlap)
            folder = (given.trace or Path(scratch)) / name
            samples = opened.samples(given.sequences, tokens)
            figures[name] = measure(engine, samples, given.steps, folder, given.module)
            _tell(name, figures[name])
    return figures | {
        "load_s": loaded,
        "compile_s": engine.meter.compile_s,
        "compiles": engine.programs.count,
    }


def _tell(name: str, row: dict[str, Any]) -> None:
    copied = row["copy_us"]
    copies = "no copies traced" if copied is None else f"a copy runs in {copied:.1f} us of it"
    LOG.info(
        f"{name}: {row['steps']} steps of {row['step_us']:.0f} us, gap {row['gap_us']:.1f} us "
        f"({100 * row['share_of_medians']:.1f} %; of all time {100 * row['share']:.1f} %; nine of "
        f"ten at most {row['gap_p90_us']:.1f} us; {copies})"
    )


if __name__ == "__main__":
    main()
