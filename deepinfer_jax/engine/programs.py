"""Compiled step programs by bucket: compiled ahead, side by side, and counted."""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.errors import LateCompileError
from deepinfer_jax.runner.compile import compile_step
from deepinfer_jax.runner.layout import ProgramKey
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import Network, Params, StepOptions

LateCompile = Literal["warn", "error"]


@dataclass(frozen=True)
class Late:
    """A program that was missing after warm-up, and why."""

    key: ProgramKey
    reason: str

    @property
    def shape(self) -> str:
        """Its static sizes in words."""
        b, scored = self.key.bucket, self.key.prompt
        return (
            f"{b.rows} rows, {b.decoder_rows} decoder rows, {b.parts} parts, {b.updates} page "
            f"updates, {self.key.top} top log-probs"
            + ("" if scored is None else f", scored with {scored} top log-probs")
        )


@dataclass(frozen=True)
class Compiled:
    """One program was compiled.

    Attributes:
        key: its sizes and forms.
        seconds: it took.
        done, total: programs of this warm-up that are compiled, and all of them.
        late: set when it was missing after warm-up.
    """

    key: ProgramKey
    seconds: float
    done: int
    total: int
    late: Late | None = None

    @property
    def name(self) -> str:
        """What a progress line calls it; of a late one with shape and reason."""
        if self.late is None:
            scored = "" if self.key.prompt is None else ", scored"
            return f"step, {self.key.bucket.rows} rows{scored}"
        return f"late: step, {self.late.shape}: {self.late.reason}"


Report = Callable[[Compiled], None]


def top_count(wanted: int, vocab: int) -> int:
    """How many top log-probs a program returns so that `wanted` can be read off."""
    return 0 if not wanted else min(1 << (wanted - 1).bit_length(), vocab)


class Programs:
    """The step, compiled for one network's buckets.

    Attributes:
        compile_s: seconds spent compiling.
        late: programs that were missing after warm-up.
        logprobs: which distribution the top log-probs describe.
        options: of every program but `top`.
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
        late_compile: LateCompile = "warn",
    ):
        """Compile nothing yet.

        Args:
            network, params, mesh: what runs, and where.
            state: the engine's state or its shapes.
            options: of every program; `top` and `prompt` are given by program.
            host_memory: Engram rows come with the input.
            report: called after each program is compiled, in the caller's thread.
            kept: folder of compiled programs, or None.
            late_compile: what a program that is missing after warm-up is: an "error", or compiled
                and reported with its shape and reason ("warn").
        """
        self.compile_s = 0.0
        self.late: list[Late] = []
        self.logprobs, self.options = options.logprobs, options
        self._network, self._mesh = network, mesh
        self._shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
        )
        self._host_memory, self._report, self._kept = host_memory, report, kept
        self._late_compile: LateCompile = late_compile
        self._programs: dict[ProgramKey, Callable[..., Any]] = {}
        self._sealed = False

    @property
    def count(self) -> int:
        """Programs that are compiled."""
        return len(self._programs)

    @property
    def sealed(self) -> bool:
        """Warm-up is over: whatever is missing from here on is late."""
        return self._sealed

    @property
    def state_shapes(self) -> Any:
        """Shapes and dtypes of the state that the programs take."""
        return self._shapes[1]

    def prepare(self, wanted: Iterable[ProgramKey]) -> None:
        """Compile the programs of these keys, side by side."""
        missing = [key for key in dict.fromkeys(wanted) if key not in self._programs]
        if missing:
            self._prepare(missing)

    def seal(self) -> None:
        """End the warm-up. `prepare` still adds programs; `get` no longer does so quietly."""
        self._sealed = True

    def get(self, key: ProgramKey) -> Callable[..., Any]:
        """The program of a key, which is compiled now if it was not prepared.

        Raises LateCompileError for such a one after warm-up where that is an error.
        """
        if key not in self._programs:
            late = None
            if self._sealed:
                late = Late(key, self._reason(key))
                if self._late_compile == "error":
                    raise _refused(late, self.count)
                self.late.append(late)
            self._prepare([key], late)
        return self._programs[key]

    def memory_rows(self, rows: int) -> tuple[np.ndarray, ...] | None:
        """Empty Engram rows of a step, or None when the tables are on the device."""
        if not self._host_memory:
            return None
        config = self._network.config
        shape = (rows, config.engram_columns * config.engram_head_dim)
        dtype = self._network.arithmetic.dtype
        return tuple(np.zeros(shape, dtype) for _ in config.engram_layer_ids)

    def _prepare(self, missing: list[ProgramKey], late: Late | None = None) -> None:
        start = time.perf_counter()
        pool = ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1))
        try:
            keys = {pool.submit(self._compile, key): key for key in missing}
            for done, future in enumerate(as_completed(keys), 1):
                key = keys[future]
                self._programs[key], seconds = future.result()
                if self._report is not None:
                    self._report(Compiled(key, seconds, done, len(missing), late))
        finally:
            # After an error or an interrupt, what has not begun never does.
            pool.shutdown(cancel_futures=True)
        self.compile_s += time.perf_counter() - start

    def _reason(self, key: ProgramKey) -> str:
        known = [k for k in self._programs if k.bucket == key.bucket]
        if not known:
            return "no program of this bucket was prepared"
        if key.prompt is not None and all(k.prompt != key.prompt for k in known):
            return "the form that scores prompts was not prepared"
        tops = sorted({k.top for k in known if k.prompt == key.prompt})
        return f"the form with {key.top} top log-probs was not prepared, only {tops}"

    def _compile(self, key: ProgramKey) -> tuple[Callable[..., Any], float]:
        start = time.perf_counter()
        ints, floats = key.bucket.empty()
        memory: Any = self.memory_rows(key.bucket.rows)
        inputs = StepInput(ints, floats, memory)  # type: ignore[arg-type]
        program = compile_step(
            self._network,
            self._mesh,
            (*self._shapes, inputs),
            bucket=key.bucket,
            options=replace(self.options, top=key.top, prompt=key.prompt),
            kept=self._kept,
        )
        return program, time.perf_counter() - start


def _refused(late: Late, count: int) -> LateCompileError:
    return LateCompileError(
        f"A step of {late.shape} is not among the {count} programs that were compiled ahead.",
        f"The reason is that {late.reason}, and engine.late_compile is error.",
        "Prepare it before the run (LLM.prepare), or set engine.late_compile=warn.",
    )
