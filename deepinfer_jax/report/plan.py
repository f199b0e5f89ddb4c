"""What an engine holds in memory, in bytes, by part."""

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one engine on its device.

    Attributes:
        weights: parameters without the Engram tables.
        engram_tables: tables that lie on the device; 0 when they are in host memory or on disk.
        cache: all slots together.
        slots, positions: sequences at a time, and the longest of them in tokens.
        free: what the device could still give before the weights were loaded; None when unknown.
    """

    weights: int
    engram_tables: int
    cache: int
    slots: int
    positions: int
    free: int | None

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.engram_tables + self.cache

    @property
    def fits(self) -> bool | None:
        """Whether the parts fit into what was free; None when that is unknown."""
        return None if self.free is None else self.total <= self.free


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or abstract arrays, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
