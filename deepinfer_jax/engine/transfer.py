"""Sequences that move: to host memory and back when pages are short, and to a sample's own slot."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.engine.roster import Moves
from deepinfer_jax.runner.compile import compile_moves
from deepinfer_jax.runner.slots import PAGES


class Transfer:
    """Carries out the moves that a plan asks for; what is in host memory is kept here."""

    def __init__(self, mesh: Mesh, shapes: Any):
        """Compile nothing yet; `shapes` are those of the engine's state."""
        self._mesh, self._shapes = mesh, shapes
        self._programs: tuple[Any, Any] | None = None
        self._kept: dict[int, list[Any]] = {}  # sequence -> parts of PAGES pages, on the host

    def prepare(self) -> None:
        """Compile both programs, unless that is done."""
        if self._programs is None:
            self._programs = compile_moves(self._mesh, self._shapes)

    def run(self, state: Any, moves: Moves) -> Any:
        """The state after the moves."""
        for number in moves.dropped:
            del self._kept[number]
        self.prepare()
        assert self._programs is not None
        take, put = self._programs
        for number, slot, pages in moves.saved:
            parts = [take(state, np.int32(slot), part) for part in _parts(pages)]
            self._kept[number] = jax.device_get(parts)
        for slot, page, other, others in moves.copied:
            held = take(state, np.int32(slot), *_parts([page]))
            state = put(state, held, np.int32(other), *_parts([others]))
        for number, slot, pages in moves.loaded:
            for held, part in zip(self._kept.pop(number), _parts(pages), strict=True):
                state = put(state, held, np.int32(slot), part)
        return state


def _parts(pages: list[int]) -> list[np.ndarray]:
    """The pages, PAGES at a time, filled up with -1."""
    padded = np.full(-(-len(pages) // PAGES) * PAGES, -1, np.int32)
    padded[: len(pages)] = pages
    return list(padded.reshape(-1, PAGES))
