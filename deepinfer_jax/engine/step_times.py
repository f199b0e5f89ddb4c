"""What a step will take: the measured cost table, corrected by the steps that have run since.

The corrections are those of the original engine (section 7.3): a slope for rows, since running
steps read caches that the measurement's did not have, and the time of sampling and drafting.
"""

from bisect import bisect_left, insort
from collections import defaultdict, deque
from statistics import median

import numpy as np

from deepinfer_jax.sampling.lengths import CostTable

WINDOW = 5000
LEAST_OF_A_SIZE = 10
SAMPLER_WINDOW, LEAST_OF_SAMPLER = 9, 5


class StepTimes:
    """A cost table and what was seen of steps.

    Attributes:
        table: as measured, of steps that propose drafts; it does not change.
        drafting_ms: how much of every time proposing takes.
    """

    def __init__(self, table: CostTable, drafting_ms: float = 0.0):
        self.table, self.drafting_ms = table, drafting_ms
        self._window: deque[tuple[int, float]] = deque()
        self._sorted: dict[int, list[float]] = defaultdict(list)
        self._sampler: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLER_WINDOW))
        self._any_sampler: deque[float] = deque(maxlen=SAMPLER_WINDOW)

    def observe(self, sequences: int, size: int, forward_ms: float, sampler_ms: float) -> None:
        """Count a step of `sequences` sequences in the program of `size` rows, a size of the table.

        `forward_ms` is what the target's forward took, `sampler_ms` sampling and drafting.
        """
        residual = (forward_ms - float(self.table.ms[self.table.place(size)])) / size
        if len(self._window) == WINDOW:
            old_size, old = self._window.popleft()
            of_size = self._sorted[old_size]
            del of_size[bisect_left(of_size, old)]
        self._window.append((size, residual))
        # Kept sorted, so that a median of thousands costs nothing when a step is planned.
        insort(self._sorted[size], residual)
        self._sampler[sequences].append(sampler_ms)
        self._any_sampler.append(sampler_ms)

    @property
    def slope_ms(self) -> float:
        """Milliseconds a row beyond the table, at least 0.

        The median of the medians of every size that was seen 10 times in the last 5000 steps; 0
        when there is none.
        """
        medians = [
            (seen[(n - 1) // 2] + seen[n // 2]) / 2
            for seen in self._sorted.values()
            if (n := len(seen)) >= LEAST_OF_A_SIZE
        ]
        return max(0.0, median(medians)) if medians else 0.0

    def sampler_ms(self, sequences: int) -> float:
        """Median of the last 9 steps of so many sequences, of which there must be 5.

        Else of the last 9 steps of any number, if there were 5; else 0.
        """
        for seen in (self._sampler.get(sequences, ()), self._any_sampler):
            if len(seen) >= LEAST_OF_SAMPLER:
                return float(median(seen))
        return 0.0

    def milliseconds(self, sequences: int) -> np.ndarray:
        """float64 [k], of a step of each size of the table, as `sampling.lengths.budget` asks."""
        return self.table.milliseconds(self.slope_ms, self.sampler_ms(sequences))
