"""How many drafts a step verifies in all: the host's half, from what it has read by then.

What it reads of a step is two steps old when it plans, in overlapped mode because it cannot be
newer and in plain mode by choice: a budget must not depend on the drafts that it is for.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.sampling.lengths import budget, filled, survival

_LAG = 2  # steps


def decode_sizes(buckets: Sequence[Bucket], sequences: int) -> list[Bucket]:
    """The programs in which so many sequences can decode, one of each number of rows, rising."""
    wide = max(b.parts for b in buckets)
    most = max(b.drafts for b in buckets)
    fitting: dict[int, Bucket] = {}
    for bucket in sorted(buckets):
        decodes = bucket.rows == bucket.decoder_rows and bucket.rows <= wide * (1 + most)
        if decodes and bucket.parts >= sequences:
            fitting.setdefault(bucket.rows, bucket)
    return list(fitting.values())


class Lengths:
    """Confidences of the drafts of each slot, and what steps take."""

    def __init__(self, slots: int, drafts: int, times: Mapping[int, StepTimes]):
        """Nothing was drafted yet.

        Args:
            slots, drafts: sizes.
            times: sequences -> what steps take in which at most so many decode.
        """
        self._times, self._drafts = dict(sorted(times.items())), drafts
        # Of each slot (step, sequence, survivals), the newest last.
        self._seen: list[deque[tuple[int, int, np.ndarray]]] = [deque() for _ in range(slots)]

    def note(self, step: int, slot: int, sequence: int, confidence: np.ndarray) -> None:
        """Take in the confidences float32 [g] of what a step drafted for a sequence."""
        seen = self._seen[slot]
        seen.append((step, sequence, survival(confidence)))
        while len(seen) > _LAG + 1:
            seen.popleft()

    def observe(self, sequences: int, bucket: Bucket, seconds: float) -> None:
        """Take in how long a step took in which sequences decoded and nothing else ran."""
        times = self._of(sequences)
        if bucket.rows in times.table.sizes:
            times.observe(sequences, bucket.rows, 1e3 * seconds, 0.0)

    def budget(
        self, step: int, slots: np.ndarray, sequences: np.ndarray, drafts: np.ndarray
    ) -> int:
        """Drafts that step `step` verifies in all.

        Args:
            step: that is planned.
            slots: int32 [n], that decode. sequences: int32 [n], their numbers.
            drafts: int32 [n], how many of each can be verified.
        """
        n = len(slots)
        values, known = np.zeros((n, self._drafts), np.float32), np.zeros(n, bool)
        for place, (slot, sequence) in enumerate(zip(slots, sequences, strict=True)):
            for made, owner, sure in reversed(self._seen[int(slot)]):
                if owner == sequence and made <= step - _LAG:
                    values[place], known[place] = sure, True
                    break
        values = filled(values, known, drafts > 0)
        times = self._of(n)
        return budget(values, drafts, times.table.sizes, times.milliseconds(n)) - n

    def _of(self, sequences: int) -> StepTimes:
        return next(times for most, times in self._times.items() if most >= sequences)
