"""When a device ran which program, read from a trace that `jax.profiler` has written.

A profiler writes kernels, not programs, on a GPU: each with the module it belongs to and the
number of the host's launch. The same program launches the same number of kernels every time, so
its kernels in launch order fall into as many equal parts as it was run. On a CPU an operation names
its run. A device that writes whole modules (a line "XLA Modules") needs neither.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

_DEVICE, _HOST = ("/device:GPU", "/device:TPU"), "/host:CPU"
_WHOLE = "XLA Modules"
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """A stretch of time, nanoseconds on the trace's clock."""

    start: float
    end: float


@dataclass(frozen=True)
class Operation(Span):
    """A kernel or copy that a device ran, or a whole program where the device writes those.

    Attributes:
        name: as the profiler writes it.
        module: of the program it belongs to; None for a transfer, and for a kernel of a CUDA graph
            whose program the profiler does not know.
        run: which run of the program, or None when the device does not tell.
        launch: number of the host's launch, ascending; 0 when the device does not tell.
        copy: it moves bytes and computes nothing.
    """

    name: str
    module: str | None
    run: int | None
    launch: int
    copy: bool


def newest(folder: Path) -> Path:
    """The last trace that `jax.profiler` wrote under a folder. Raises ConfigError without one."""
    found = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"There is no trace under {folder}.",
            "jax.profiler writes a file *.xplane.pb, and a figure needs one.",
            "Check that the folder can be written, and that jax's profiler works here.",
        )
    return found[-1]


def operations(profile: Any) -> list[Operation]:
    """All operations of the one device that ran any, in order of their start.

    `profile` is a `jax.profiler.ProfileData`.

    Raises ConfigError when no device, or more than one, has run operations of a program.
    """
    with warnings.catch_warnings():
        # The binding's types warn when they are first made; as errors that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _operations(profile)


def _operations(profile: Any) -> list[Operation]:
    planes = {p.name: p for p in profile.planes}
    found = {name: _of_device(p) for name, p in planes.items() if name.startswith(_DEVICE)}
    found = {name: ops for name, ops in found.items() if any(not op.copy for op in ops)}
    if not found and _HOST in planes and not any(n.startswith(_DEVICE) for n in planes):
        found = {name: ops for name, ops in [(_HOST, _of_cpu(planes[_HOST]))] if ops}
    if len(found) != 1:
        raise ConfigError(
            f"The trace holds programs of {len(found)} devices; its planes are {sorted(planes)}.",
            "A gap between programs is one device's, and needs its operations.",
            "Trace a process that runs on one device, and see that its profiler is allowed to "
            "read the device.",
        )
    return sorted(next(iter(found.values())), key=lambda op: op.start)


def _of_device(plane: Any) -> list[Operation]:
    whole = [line for line in plane.lines if line.name == _WHOLE]
    if whole:
        return [
            Operation(e.start_ns, e.end_ns, e.name, re.sub(r"\(\d+\)$", "", e.name), n, 0, False)
            for n, e in enumerate(e for line in whole for e in line.events)
        ]
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    return [_operation(event) for line in streams for event in line.events]


def _of_cpu(plane: Any) -> list[Operation]:
    every = (_operation(event) for line in plane.lines for event in line.events)
    return [op for op in every if op.module is not None and op.run is not None]


def _operation(event: Any) -> Operation:
    stats = dict(event.stats)
    module, program = stats.get("hlo_module"), stats.get("program_id")
    return Operation(
        start=event.start_ns,
        end=event.end_ns,
        name=event.name,
        module=None if module is None else f"{module}({program})",
        run=stats.get("run_id"),
        launch=int(stats.get("correlation_id", 0)),
        copy=module is None and _COPY.search(event.name) is not None,
    )


def executions(ops: Sequence[Operation], count: int, pattern: str = "") -> list[Span]:
    """The runs of the program that kept the device busiest, in order.

    Args:
        ops: of one device, from `operations`.
        count: how often the program was run while the trace was taken.
        pattern: a regular expression that its module's name must hold.

    Raises:
        ConfigError: no module of such a name, or its operations are not those of `count` runs.
    """
    busy: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.module is not None:
            busy[op.module] += op.end - op.start
    named = {m: spent for m, spent in busy.items() if re.search(pattern, m)}
    # A graph's kernels may be nameless; the traced loop launches none but the step's.
    nameless = [op for op in ops if op.module is None and not op.copy]
    if not named and (pattern or not nameless):
        raise _unread(ops, count, f"no module's name holds {pattern!r}")
    module = max(named, key=named.__getitem__) if named else None
    mine = [op for op in ops if not op.copy and op.module in (module, None)]
    if all(op.run is not None for op in mine):
        parts = _by(mine, lambda op: op.run)
    else:
        parts = _equal_parts(mine, count)
    if len(parts) != count:
        raise _unread(ops, count, f"{len(mine)} operations of {module} are {len(parts)} runs")
    spans = [Span(min(op.start for op in p), max(op.end for op in p)) for p in parts]
    return sorted(spans, key=lambda span: span.start)


def _by(ops: Iterable[Operation], key: Any) -> list[list[Operation]]:
    groups: dict[Any, list[Operation]] = defaultdict(list)
    for op in ops:
        groups[key(op)].append(op)
    return list(groups.values())


def _equal_parts(ops: Sequence[Operation], count: int) -> list[list[Operation]]:
    """The operations of each run, in launch order; empty when the runs cannot be told apart."""
    order = sorted(ops, key=lambda op: (op.launch, op.start))
    launches = _by(order, lambda op: op.launch) if all(op.launch for op in order) else []
    names = [tuple(sorted(op.name for op in launch)) for launch in launches]
    size, rest = divmod(len(launches), count)
    begins = [i for i, name in enumerate(names) if name == names[0]]
    if size and not rest and len({names[i] for i in range(0, len(names), size)}) == 1:
        begins = list(range(0, len(names), size))
    elif len(begins) != count:
        # Some run launched more kernels than another, and the first of a run is no landmark.
        return []
    ends = [*begins[1:], len(launches)]
    return [sum(launches[a:b], []) for a, b in zip(begins, ends, strict=True)]


def _unread(ops: Sequence[Operation], count: int, found: str) -> ConfigError:
    held = ", ".join(
        f"{len(group)} of {group[0].module or ('copies' if group[0].copy else 'no module')}"
        for group in _by(ops, lambda op: (op.module, op.copy))
    )
    return ConfigError(
        f"The {count} runs of the step cannot be found in the trace: {found}.",
        f"It holds these operations: {held}.",
        "Name another module with --module, keep the trace with --trace DIR and look at it, or set "
        "XLA_FLAGS=--xla_gpu_enable_command_buffer= so that kernels are launched one by one.",
    )


def overlap(gap: Span, others: Iterable[Span]) -> float:
    """Nanoseconds of `gap` in which at least one of the others runs; they come by start."""
    covered, reached = 0.0, gap.start
    for other in others:
        if other.end > reached and other.start < gap.end:
            covered += min(other.end, gap.end) - max(other.start, reached)
            reached = min(other.end, gap.end)
    return covered
