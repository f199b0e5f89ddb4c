"""How fast each training step is: compile seconds, milliseconds, tokens a second, memory."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from deepinfer_jax.training.batches import on_devices, stacked
from deepinfer_jax.training.nano_data import Request
from deepinfer_jax.training.piece import LOG, Plan, begin
from deepinfer_jax.training.steps import batch_shapes, train_step

_GIB = 1 << 30


def benchmark(plan: Plan, only: Sequence[str], repeats: int = 20, profile: bool = False) -> None:
    """Compile and time the step kinds named in `only` (all four when empty); log a line each.

    With `profile`, also log the kernels that take the most time. Every step is timed to its end,
    after three that are not counted.
    """
    kinds = [plan.kind(shape, q) for q in (False, True) for shape in ("short", "long")]
    state = begin(plan, None)
    for kind in kinds:
        if only and kind.name not in only:
            continue
        began = time.monotonic()
        step = train_step(plan.config, plan.settings, plan.token_map, plan.mesh, kind)
        lowered = step.lower(state, batch_shapes(kind, plan.mesh))
        traced = time.monotonic() - began
        compiled = lowered.compile(compiler_options=dict(plan.compiler))
        seconds = time.monotonic() - began - traced
        shape = "long" if kind.decoder_start else "short"
        requests = [Request(shape, 0, i, 1.0) for i in range(plan.mesh.devices.size)]
        batch = on_devices(stacked(list(plan.source(requests))), plan.mesh)
        times = []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            state, report = compiled(state, batch)
            report.block_until_ready()
            times.append(time.perf_counter() - start)
        middle = float(np.median(times[3:]))
        memory = compiled.memory_analysis()
        temporary = memory.temp_size_in_bytes / _GIB if memory is not None else float("nan")
        rate = kind.rows * kind.columns / middle
        LOG.info(
            f"{kind.name}: trace {traced:.1f} s, compile {seconds:.1f} s, step {1e3 * middle:.2f} "
            f"ms (fastest {1e3 * min(times[3:]):.2f}), {rate / 1e3:.0f} k tokens/s, "
            f"temporary {temporary:.1f} GiB"
        )
        if profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(3):
                        state, report = compiled(state, batch)
                    jax.block_until_ready(state)
                for line in kernel_times(Path(folder), 3):
                    LOG.info("  " + line)


def kernel_times(folder: Path, steps: int, most: int = 45) -> list[str]:
    """The `most` costliest kernels of a profile: milliseconds a step, launches a step, name."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for file in folder.rglob("*.xplane.pb"):
        data = jax.profiler.ProfileData.from_file(str(file))
        for plane in data.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    totals[event.name][0] += event.duration_ns
                    totals[event.name][1] += 1
    ranked = sorted(totals.items(), key=lambda pair: -pair[1][0])
    whole = sum(t for t, _ in totals.values()) / 1e6 / steps
    lines = [f"{whole:.2f} ms a step in {sum(n for _, n in totals.values()) / steps:.0f} kernels"]
    lines += [f"{t / 1e6 / steps:8.3f} ms {n / steps:6.1f} x {k}" for k, (t, n) in ranked[:most]]
    return lines
