"""How batches reach the devices: a source of host batches, a synthetic one, and the prefetch."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.nano_data import Request
from deepinfer_jax.training.steps import AXIS

_AHEAD = 2  # batches on the device before they are needed
_POLL_S = 0.2  # how often a blocked feeder looks whether it should end


class HostBatch(Protocol):
    """What a source yields, all [b, t]."""

    @property
    def ids(self) -> np.ndarray:
        """int32 token ids."""
        ...

    @property
    def segment(self) -> np.ndarray:
        """int32, 0 for padding."""
        ...

    @property
    def weight(self) -> np.ndarray:
        """float32 loss weights."""
        ...

    @property
    def skill(self) -> np.ndarray:
        """int8 skill numbers, -1 for padding."""
        ...


Source = Callable[[Iterable[Request]], Iterator[HostBatch]]
"""Batches of the requests, one each, in order."""


@dataclass(frozen=True)
class Shape:
    """Rows a device, columns, and columns at the end that the decoder layers run on."""

    rows: int
    columns: int
    decoder_rows: int


@dataclass(frozen=True)
class SyntheticBatch:
    """A `HostBatch` without text."""

    ids: np.ndarray
    segment: np.ndarray
    weight: np.ndarray
    skill: np.ndarray


def synthetic(config: ModelConfig, short: Shape, long: Shape) -> Source:
    """Batches of counting sequences: the next token is the last one plus one, after a random start.

    Every target is trained; segments are half a row. For smoke tests and speed measurements.
    """

    def source(requests: Iterable[Request]) -> Iterator[HostBatch]:
        for request in requests:
            shape = short if request.shape == "short" else long
            rng = np.random.default_rng((request.seed, request.index, request.shape == "long"))
            half = shape.columns // 2
            first = rng.integers(0, config.vocab_size, (shape.rows, 2, 1))
            ids = (first + np.arange(half)) % min(config.vocab_size, 64)
            ids = ids.reshape(shape.rows, -1).astype(np.int32)
            segment = np.repeat([[1, 2]], half, axis=1).repeat(shape.rows, axis=0)
            weight = np.ones(ids.shape, np.float32)
            weight[:, [half - 1, -1]] = 0
            weight[:, : shape.columns - shape.decoder_rows] = 0
            skill = np.where(weight > 0, 0, -1).astype(np.int8)
            yield SyntheticBatch(ids, segment.astype(np.int32), weight, skill)

    return source


def stacked(batches: Sequence[HostBatch]) -> dict[str, np.ndarray]:
    """One host batch for several devices, rows after rows; skill widened to int32."""
    return {
        "ids": np.concatenate([b.ids for b in batches]),
        "segment": np.concatenate([b.segment for b in batches]),
        "weight": np.concatenate([b.weight for b in batches]),
        "skill": np.concatenate([b.skill for b in batches]).astype(np.int32),
    }


def on_devices(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The batch split over the mesh by rows."""
    return jax.device_put(batch, NamedSharding(mesh, P(AXIS)))


@dataclass(frozen=True)
class Planned:
    """One step of the plan: its number, shape and difficulty."""

    step: int
    shape: Literal["short", "long"]
    level: float


class Feed:
    """A thread that keeps device batches ready, in the order of a plan.

    Use as a context manager. `next` raises what the source raised.
    """

    def __init__(self, source: Source, plan: Iterable[Planned], seed: int, mesh: Mesh):
        """`plan` may be endless; each step asks the source for one batch per device."""
        self._mesh, self._devices = mesh, mesh.devices.size
        self._source, self._plan, self._seed = source, plan, seed
        self._ready: queue.Queue[dict[str, jax.Array] | BaseException] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-feed", daemon=True)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def next(self) -> dict[str, jax.Array]:
        """The next batch on the devices."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _requests(self) -> Iterator[Request]:
        for planned in self._plan:
            for device in range(self._devices):
                if self._stop.is_set():
                    return
                index = planned.step * self._devices + device
                yield Request(planned.shape, self._seed, index, planned.level)

    def _run(self) -> None:
        try:
            part: list[HostBatch] = []
            for batch in self._source(self._requests()):
                part.append(batch)
                if len(part) == self._devices:
                    self._put(on_devices(stacked(part), self._mesh))
                    part = []
                if self._stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._put(error)

    def _put(self, item: dict[str, jax.Array] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue
