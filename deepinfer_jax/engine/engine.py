"""Static batching: sequences in fixed slots, prompts chunk by chunk, one decode step for all.

A slot that becomes free takes the next waiting sequence; the others go on meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.engine.sequence import Sequence, pack_draw
from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.runner.compile import compile_step, replicated
from deepinfer_jax.runner.step import (
    Network,
    Params,
    StepInput,
    init_state,
    pack_rows,
)

Memory = Callable[[np.ndarray, int, int], tuple[np.ndarray, ...]]
Report = Callable[[str, float], None]
_SMALLEST_PREFILL = 128


@dataclass
class Meter:
    """What the engine has done, for tables and figures.

    Attributes:
        prompt_tokens, output_tokens: counts.
        prefill_s, decode_s: seconds of steps, waiting for their result included.
        device_s: seconds of those spent waiting for the device; decode_device_s of decode alone.
        compile_s: seconds spent compiling; not part of the others.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    device_s: float = 0.0
    decode_device_s: float = 0.0
    compile_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Sizes of the static batch.

    Attributes:
        slots: sequences at a time.
        positions: longest sequence, in tokens.
        prefill_rows: prompt rows of one step.
    """

    slots: int
    positions: int
    prefill_rows: int

    def decode_rows(self, live: int) -> int:
        """Rows of the decode program for `live` sequences: 1, 4, 16, ... or all slots."""
        rows = 1
        while rows < live:
            rows *= 4
        return min(rows, self.slots)

    def prompt_rows(self, tokens: int) -> int:
        """Rows of the prefill program for a chunk of `tokens`: 128, 256, ... or a whole chunk."""
        rows = _SMALLEST_PREFILL
        while rows < tokens:
            rows *= 2
        return min(rows, self.prefill_rows)


class Engine:
    """Runs sequences on one network."""

    def __init__(
        self,
        network: Network,
        params: Params,
        mesh: Mesh,
        *,
        limits: Limits,
        draw: str = "stable",
        logprobs: str = "raw",
        memory: Memory | None = None,
        report: Report | None = None,
        kept: Path | None = None,
    ):
        """Hold a network.

        Args:
            network, params, mesh: from the assembly.
            limits: sizes.
            draw, logprobs: sampler and kind of log-probs.
            memory: (token ids, start, stop) -> Engram rows, when the tables are off the device.
            report: called with a program's name and seconds after it was compiled.
            kept: folder of compiled programs, or None.
        """
        self.meter = Meter()
        self._network, self._params, self._mesh = network, params, mesh
        self._limits, self._draw, self._logprobs = limits, draw, logprobs
        self._memory, self._report, self._kept = memory, report, kept
        self._programs: dict[tuple[int, int, bool, int], Callable] = {}
        self._busy = False
        state = init_state(network, slots=limits.slots, positions=limits.positions)
        self._state = jax.device_put(state, replicated(mesh))

    def prepare(self, prompts: tuple[int, ...], live: int, logprobs: int = 0) -> None:
        """Compile, side by side, what prompts of these lengths and `live` sequences will need.

        `logprobs` is how many top log-probs will be asked for. Programs for forced tokens still
        compile when they are first used.
        """
        top, most = self._top(logprobs), self._limits.prefill_rows
        chunks = {self._limits.prompt_rows(min(n, most)) for n in prompts}
        chunks |= {self._limits.prompt_rows(n % most) for n in prompts if n > most and n % most}
        decode = self._limits.decode_rows(live)
        keys = [(decode, decode, False, top), *((rows, 1, False, top) for rows in sorted(chunks))]
        missing = [key for key in dict.fromkeys(keys) if key not in self._programs]
        start = time.perf_counter()
        with ThreadPoolExecutor(max(len(missing), 1)) as pool:
            inputs = [self._inputs([], rows, taken, [], []) for rows, taken, _, _ in missing]
            programs = pool.map(self._compile, missing, inputs)
            self._programs |= dict(zip(missing, programs, strict=True))
        self.meter.compile_s += time.perf_counter() - start

    def run(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        """Run all to their end; after each step, yields the sequences that got a token or failed.

        Sequences start in the order given. An error of one never touches another. Raises
        RequestError when another run has not ended: the slots belong to one at a time.
        """
        if self._busy:
            raise RequestError(
                "The engine is in the middle of another call.",
                "Its slots belong to one call at a time, and a stream holds them until its end.",
                "Read the other stream to its end or close it, or pass all prompts in one call.",
            )
        self._busy = True
        try:
            yield from self._run(sequences)
        finally:
            self._busy = False

    def _run(self, sequences: Iterable[Sequence]) -> Iterator[list[Sequence]]:
        waiting, live = deque(sequences), list[Sequence]()
        free = list(range(self._limits.slots))
        while waiting or live:
            while waiting and free:
                sequence = waiting.popleft()
                sequence.slot = free.pop(0)
                self._prefill(sequence)
                live.append(sequence)
                yield [sequence]
                self._release(live, free)
            if live:
                stepped = list(live)
                self._decode(stepped)
                self._release(live, free)
                yield stepped

    def _release(self, live: list[Sequence], free: list[int]) -> None:
        for sequence in [s for s in live if s.finished]:
            live.remove(sequence)
            assert sequence.slot is not None
            free.append(sequence.slot)
            sequence.slot = None

    def _prefill(self, sequence: Sequence) -> None:
        start, compiled = time.perf_counter(), self.meter.compile_s
        tokens, chunk = len(sequence.prompt), self._limits.prefill_rows
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            rows = self._limits.prompt_rows(end - begin)
            parts = [(sequence.prompt[begin:end], begin, sequence.slot or 0)]
            # Only the prompt's last row is drawn from; the draws of other chunks are not used.
            self._step(parts, rows, 1, [end - begin - 1], [sequence], use=end == tokens)
            if sequence.finished:
                break
        self.meter.prompt_tokens += tokens
        spent = time.perf_counter() - start - (self.meter.compile_s - compiled)
        self.meter.prefill_s += spent

    def _decode(self, live: list[Sequence]) -> None:
        start, compiled = time.perf_counter(), self.meter.compile_s
        parts = [(np.asarray([s.last], np.int32), s.length - 1, s.slot or 0) for s in live]
        rows = self._limits.decode_rows(len(live))
        waited = self.meter.device_s
        self._step(parts, rows, rows, list(range(len(live))), live, use=True)
        self.meter.decode_device_s += self.meter.device_s - waited
        self.meter.decode_s += time.perf_counter() - start - (self.meter.compile_s - compiled)

    def _step(
        self,
        parts: list[tuple[np.ndarray, int, int]],
        rows: int,
        taken: int,
        take: list[int],
        drawn: list[Sequence],
        *,
        use: bool,
    ) -> None:
        """Run `parts` (ids, first position, slot); draw for `drawn` at rows `take` if `use`."""
        vocab = self._network.config.vocab_size
        allowed: Any = None
        if use and any(s.forced is not None for s in drawn):
            allowed = np.ones((taken, vocab), bool)
            for i, sequence in enumerate(drawn):
                if sequence.forced is not None:
                    allowed[i] = False
                    allowed[i, sequence.forced] = True
        top = self._top(max((s.params.logprobs or 0 for s in drawn), default=0))
        inputs = self._inputs(parts, rows, taken, take, drawn, allowed)
        program = self._program(rows, taken, inputs, top)
        before = time.perf_counter()
        self._state, out = program(self._params, self._state, inputs)
        out = jax.device_get(out)
        self.meter.device_s += time.perf_counter() - before
        if not use:
            return
        chosen = out.draw.raw_logprob if self._logprobs == "raw" else out.draw.processed_logprob
        for i, sequence in enumerate(drawn):
            if sequence.finished:
                continue  # its Engram rows could not be read
            if out.draw.bad[i]:
                sequence.fail(_not_finite(sequence))
                continue
            count = sequence.params.logprobs
            if count is not None:
                ids, tops = out.top_ids[i, :count], out.top_logprobs[i, :count]
                sequence.record(float(chosen[i]), ids, tops)
            sequence.append(
                int(out.draw.token[i]),
                eos=self._network.config.eos_token_id,
                limit=self._limits.positions,
            )
            self.meter.output_tokens += 1

    def _top(self, wanted: int) -> int:
        """How many top log-probs a program returns so that `wanted` can be read off."""
        return (
            0
            if not wanted
            else min(1 << (wanted - 1).bit_length(), self._network.config.vocab_size)
        )

    def _inputs(
        self,
        parts: list[tuple[np.ndarray, int, int]],
        rows: int,
        taken: int,
        take: list[int],
        drawn: list[Sequence],
        allowed: Any = None,
    ) -> StepInput:
        return StepInput(
            rows=pack_rows(parts, rows),
            take=cast(Any, np.pad(np.asarray(take, np.int32), (0, taken - len(take)))),
            draw=pack_draw(drawn, taken),
            allowed=allowed,
            memory=self._looked_up(parts, drawn, rows),
        )

    def _looked_up(
        self, parts: list[tuple[np.ndarray, int, int]], drawn: list[Sequence], rows: int
    ) -> Any:
        if self._memory is None:
            return None
        config, at = self._network.config, 0
        shape = (rows, config.engram_columns * config.engram_head_dim)
        dtype = self._network.arithmetic.dtype
        found = tuple(np.zeros(shape, dtype) for _ in config.engram_layer_ids)
        for (ids, begin, _), sequence in zip(parts, drawn, strict=True):
            tokens = np.concatenate([sequence.prompt, np.asarray(sequence.output, np.int32)])
            try:
                read = self._memory(tokens, begin, begin + len(ids))
            except DeepInferError as error:
                sequence.fail(error)
            else:
                for layer, values in zip(found, read, strict=True):
                    layer[at : at + len(ids)] = values
            at += len(ids)
        return found

    def _program(self, rows: int, taken: int, inputs: StepInput, top: int) -> Callable:
        key = (rows, taken, inputs.allowed is not None, top)
        if key not in self._programs:
            start = time.perf_counter()
            self._programs[key] = self._compile(key, inputs)
            self.meter.compile_s += time.perf_counter() - start
        return self._programs[key]

    def _compile(self, key: tuple[int, int, bool, int], inputs: StepInput) -> Callable:
        start = time.perf_counter()
        program = compile_step(
            self._network,
            self._mesh,
            (self._params, self._state, inputs),
            draw=self._draw,
            logprobs=self._logprobs,
            top=key[3],
            kept=self._kept,
        )
        if self._report is not None:
            kind = "decode" if key[0] == key[1] else "prefill"
            self._report(f"{kind}, {key[0]} rows", time.perf_counter() - start)
        return program


def _not_finite(sequence: Sequence) -> RequestError:
    return RequestError(
        f"The logits after token {sequence.length} hold NaN or infinity.",
        "No token can be drawn from such a distribution.",
        "Check the checkpoint's digest; if it is right, report the prompt.",
    )
