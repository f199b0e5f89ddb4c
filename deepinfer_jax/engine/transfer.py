"""Sequences that move: to host memory and back when pages are short, and to a sample's own slot."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.engine.roster import Moves
from deepinfer_jax.runner.compile import compile_moves
from deepinfer_jax.runner.slots import PAGES


class Transfer:
    """Carries out the moves that a plan asks for; what is in host memory is kept here."""

    def __init__(self, mesh: Mesh, state: Any):
        """Compile nothing yet; `state` is the engine's, or its shapes."""
        self._mesh = mesh
        self._shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        self._programs: tuple[Any, Any] | None = None
        self._kept: dict[int, list[Any]] = {}  # sequence -> parts of PAGES pages, on the host

    def prepare(self) -> None:
        """Compile both programs, unless that is done."""
        if self._programs is None:
            self._programs = compile_moves(self._mesh, self._shapes)

    def run(self, state: Any, moves: Moves, alive: Iterable[int]) -> Any:
        """The state after the moves; what is kept of sequences that are not `alive` is dropped."""
        if self._kept:
            known = set(alive)
            self._kept = {n: parts for n, parts in self._kept.items() if n in known}
        if not (moves.saved or moves.copied or moves.loaded):
            return state
        self.prepare()
        assert self._programs is not None
        take, put = self._programs
        for number, slot, pages in moves.saved:
            parts = [take(state, np.int32(slot), part) for part in _parts(pages)]
            for leaf in jax.tree.leaves(parts):
                leaf.copy_to_host_async()
            self._kept[number] = parts
        for slot, page, other, others in moves.copied:
            held = take(state, np.int32(slot), *_parts([page]))
            state = put(state, held, np.int32(other), *_parts([others]))
        for number, slot, pages in moves.loaded:
            for held, part in zip(self._kept.pop(number), _parts(pages), strict=True):
                state = put(state, held, np.int32(slot), part)
        return state

    def unload(self) -> None:
        """Let the device's copies of what was saved go; called when the next step is under way."""
        for number, parts in self._kept.items():
            if not isinstance(parts[0].length, np.ndarray):
                self._kept[number] = jax.device_get(parts)


def _parts(pages: list[int]) -> list[np.ndarray]:
    """The pages, PAGES at a time, filled up with -1."""
    padded = np.full(-(-len(pages) // PAGES) * PAGES, -1, np.int32)
    padded[: len(pages)] = pages
    return list(padded.reshape(-1, PAGES))
