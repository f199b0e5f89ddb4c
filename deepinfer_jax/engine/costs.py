"""What decode steps of each size take, measured on the engine's own programs."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.engine.varlen import decode_sizes
from deepinfer_jax.runner.cost_file import Identity, kept_or_measured
from deepinfer_jax.runner.layout import Bucket, DraftWord, Flag, Part
from deepinfer_jax.sampling.lengths import CostTable

Run = Callable[[Bucket, np.ndarray, np.ndarray], Any]
"""Runs the program of a bucket on the packed arrays and returns when it has ended."""


def full_step(bucket: Bucket, *, proposes: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of a step in which every row is a real one: one draft more for the first parts.

    `proposes`: new drafts are made, which the next such step has to verify.
    """
    ints, floats = bucket.empty()
    _, parts, _, _, drafting = bucket.split(ints)
    drafting[DraftWord.PROPOSES] = proposes
    number = np.arange(bucket.parts)
    parts[:, Part.SLOT] = number
    parts[:, Part.COUNT] = bucket.rows // bucket.parts + (number < bucket.rows % bucket.parts)
    parts[:, Part.FLAGS] = Flag.DRAWS
    parts[:, Part.LIMIT] = np.iinfo(np.int32).max
    return ints, floats


def step_times(
    buckets: Sequence[Bucket],
    run: Run,
    *,
    folder: Path | None,
    identity: Identity,
    ttl_s: float,
) -> dict[int, StepTimes]:
    """Sequences -> what steps take in which at most so many decode; from `folder` or measured now.

    Args:
        buckets: of the engine.
        run: runs one of their programs.
        folder, identity, ttl_s: see `runner.cost_file.kept_or_measured`.
    """

    def table(bucket_of: Mapping[int, Bucket], *, proposes: bool, sequences: int) -> CostTable:
        def time_step(rows: int) -> float:
            arrays = full_step(bucket_of[rows], proposes=proposes)
            before = time.perf_counter()
            run(bucket_of[rows], *arrays)
            return 1e3 * (time.perf_counter() - before)

        known = {**identity, "sequences": sequences, "proposes": proposes}
        return kept_or_measured(bucket_of, time_step, folder=folder, identity=known, ttl_s=ttl_s)

    found = {}
    for sequences in sorted({b.parts for b in buckets}):
        sizes = {b.rows: b for b in decode_sizes(buckets, sequences)}
        least = min(sizes)
        times = table(sizes, proposes=True, sequences=sequences)
        plain = table({least: sizes[least]}, proposes=False, sequences=sequences)
        drafting = float(times.ms[times.place(least)] - plain.ms[0])
        found[sequences] = StepTimes(times, max(0.0, drafting))
    return found


def measured(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those whose programs `step_times` runs."""
    return sorted({b for parts in {b.parts for b in buckets} for b in decode_sizes(buckets, parts)})
