"""Compiled step programs by bucket: compiled ahead, side by side, and counted."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.runner.compile import compile_step
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import Network, Params, StepOptions

Report = Callable[[str, float], None]


class Programs:
    """The step, compiled for one network's buckets.

    Attributes:
        compile_s: seconds spent compiling.
        late: programs that were compiled while sequences ran, as (bucket, top).
        logprobs: which distribution the top log-probs describe.
    """

    def __init__(
        self,
        network: Network,
        params: Params,
        state: Any,
        mesh: Mesh,
        options: StepOptions,
        *,
        host_memory: bool = False,
        report: Report | None = None,
        kept: Path | None = None,
    ):
        """Compile nothing yet.

        Args:
            network, params, mesh: what runs, and where.
            state: the engine's state or its shapes.
            options: of every program; `top` is given by program.
            host_memory: Engram rows come with the input.
            report: called with a program's name and seconds after it was compiled.
            kept: folder of compiled programs, or None.
        """
        self.compile_s = 0.0
        self.late: list[tuple[Bucket, int]] = []
        self.logprobs = options.logprobs
        self._network, self._mesh, self._options = network, mesh, options
        self._shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
        )
        self._host_memory, self._report, self._kept = host_memory, report, kept
        self._programs: dict[tuple[Bucket, int], Callable[..., Any]] = {}

    def prepare(self, wanted: Iterable[tuple[Bucket, int]]) -> None:
        """Compile the programs of these (bucket, top), side by side."""
        missing = [key for key in dict.fromkeys(wanted) if key not in self._programs]
        start = time.perf_counter()
        with ThreadPoolExecutor(max(len(missing), 1)) as pool:
            self._programs |= dict(zip(missing, pool.map(self._compile, missing), strict=True))
        self.compile_s += time.perf_counter() - start

    def get(self, bucket: Bucket, top: int) -> Callable[..., Any]:
        """The program of a bucket, which is compiled now if it was not prepared."""
        key = (bucket, top)
        if key not in self._programs:
            self.late.append(key)
            self.prepare([key])
        return self._programs[key]

    def memory_rows(self, rows: int) -> tuple[np.ndarray, ...] | None:
        """Empty Engram rows of a step, or None when the tables are on the device."""
        if not self._host_memory:
            return None
        config = self._network.config
        shape = (rows, config.engram_columns * config.engram_head_dim)
        dtype = self._network.arithmetic.dtype
        return tuple(np.zeros(shape, dtype) for _ in config.engram_layer_ids)

    def _compile(self, key: tuple[Bucket, int]) -> Callable[..., Any]:
        bucket, top = key
        start = time.perf_counter()
        ints, floats = bucket.empty()
        memory: Any = self.memory_rows(bucket.rows)
        inputs = StepInput(ints, floats, memory)  # type: ignore[arg-type]
        program = compile_step(
            self._network,
            self._mesh,
            (*self._shapes, inputs),
            bucket=bucket,
            options=replace(self._options, top=top),
            kept=self._kept,
        )
        if self._report is not None:
            self._report(f"step, {bucket.rows} rows", time.perf_counter() - start)
        return program
