"""Small draws that every skill uses: one member, several distinct members, a size by difficulty."""

from collections.abc import Sequence

import numpy as np


def pick[T](rng: np.random.Generator, items: Sequence[T]) -> T:
    """One member, uniformly."""
    return items[int(rng.integers(len(items)))]


def distinct[T](rng: np.random.Generator, items: Sequence[T], count: int) -> list[T]:
    """`count` different members in random order; count <= len(items)."""
    return [items[i] for i in rng.permutation(len(items))[:count].tolist()]


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number in low..high, both included."""
    return int(rng.integers(low, high + 1))


def ramp(level: float, easy: int, full: int) -> int:
    """The size at difficulty `level` in 0..1: `easy` at 0, `full` at 1, whole steps between."""
    return easy + int((full - easy) * min(max(level, 0.0), 1.0) + 1e-9)


def chance(rng: np.random.Generator, probability: float) -> bool:
    """True with this probability."""
    return float(rng.random()) < probability
