"""`python -m deepinfer_jax.bench.invariance`: what it costs to keep every row apart.

The fast kernels and those that keep rows apart take turns in one process: each op by itself at the
model's sizes, then decode and prefill of the whole engine, without drafts. A speed is the fast
kernels' time over the others', so 1 means that the promise is free.
"""

import argparse
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax

from deepinfer_jax.bench.decode import finished
from deepinfer_jax.bench.op_inputs import INPUTS, Call
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.llm import LLM
from deepinfer_jax.ops.device import Device, devices
from deepinfer_jax.ops.table import Ops, select
from deepinfer_jax.runner.compile import compiled
from deepinfer_jax.sampling_params import SamplingParams

LOG = logging.getLogger("deepinfer_jax.bench")


@dataclass(frozen=True)
class Cost:
    """One comparison.

    Attributes:
        what: an op, `decode` or `prefill`.
        size: rows of an op, sequences of a decode, tokens of a prefill.
        fast, steady: names of an op's kernels; of the engine empty.
        fast_s, steady_s: median seconds of a call, a decode step or a prefill.
    """

    what: str
    size: int
    fast: str
    steady: str
    fast_s: float
    steady_s: float

    @property
    def speed(self) -> float:
        """Of the kernels that keep rows apart, the fast ones' being 1."""
        return self.fast_s / self.steady_s


def in_turn(
    fast: Callable[[], float], steady: Callable[[], float], repeats: int
) -> tuple[float, float]:
    """Medians of the seconds that two measurements give, which take turns."""
    pairs = [(fast(), steady()) for _ in range(repeats)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _timed(call: Call, ops: Ops, window_s: float) -> Callable[[], float]:
    """Seconds of a call, over as many calls as fill the window; compiles it first."""
    run = compiled(partial(call.run, ops))
    jax.block_until_ready(run(call.given))
    begin = time.perf_counter()
    jax.block_until_ready(run(call.given))
    calls = max(1, math.ceil(window_s / max(time.perf_counter() - begin, 1e-9)))

    def measure() -> float:
        begin = time.perf_counter()
        jax.block_until_ready([run(call.given) for _ in range(calls)])
        return (time.perf_counter() - begin) / calls

    return measure


def op_costs(
    config: ModelConfig, rows: Sequence[int], *, repeats: int, window_s: float
) -> list[Cost]:
    """Every op of the kernel table at the sizes of a network, for each number of rows.

    Raises NoKernelError where an op has no kernel that keeps rows apart.
    """
    device, costs = Device.of(devices()[0]), []
    tables = select(device), select(device, batch_invariant=True)
    for fast, steady in zip(tables[0].rows(), tables[1].rows(), strict=True):
        for number in rows:
            call = INPUTS[fast.op](config, number)
            runs = [_timed(call, ops, window_s) for ops in tables]
            seconds = in_turn(runs[0], runs[1], repeats)
            costs.append(Cost(fast.op, number, fast.kernel, steady.kernel, *seconds))
    return costs


def decode_step(llm: LLM, sequences: int, tokens: int) -> float:
    """Seconds of a step in which so many sequences decode. Raises a request's error."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    before = llm.meter.decode_s
    finished(llm.generate(["hello"] * sequences, params))
    return (llm.meter.decode_s - before) / (tokens - 1)


def prefill(llm: LLM, tokens: int) -> float:
    """Seconds of a prompt of so many tokens. Raises a request's error."""
    ids = [3 + i % 200 for i in range(tokens)]
    before = llm.meter.prefill_s
    finished(llm.generate([ids], SamplingParams(max_tokens=1, temperature=0)))
    return llm.meter.prefill_s - before


def engine_costs(
    engines: tuple[LLM, LLM],
    sequences: Sequence[int],
    prompts: Sequence[int],
    *,
    tokens: int,
    repeats: int,
) -> list[Cost]:
    """Decode steps and prefills of two engines, the fast one first; each is warmed up before."""
    kinds: list[tuple[str, int, Callable[[LLM], float]]] = [
        *(("decode", n, lambda llm, n=n: decode_step(llm, n, tokens)) for n in sequences),
        *(("prefill", n, lambda llm, n=n: prefill(llm, n)) for n in prompts),
    ]
    costs = []
    for what, size, measure in kinds:
        for llm in engines:
            measure(llm)
        fast, steady = (lambda llm=llm, measure=measure: measure(llm) for llm in engines)
        costs.append(Cost(what, size, "", "", *in_turn(fast, steady, repeats)))
    return costs


def table(costs: Sequence[Cost]) -> list[str]:
    """The comparisons as lines of a Markdown table."""
    lines = ["| what | size | fast | keeps rows apart | speed |", "| --- | --- | --- | --- | --- |"]
    for c in costs:
        fast, steady = (
            f"{name} {1e3 * seconds:.3f} ms".strip()
            for name, seconds in ((c.fast, c.fast_s), (c.steady, c.steady_s))
        )
        lines.append(f"| {c.what} | {c.size} | {fast} | {steady} | {c.speed:.2f} |")
    return lines


def _sizes(text: str) -> list[int]:
    found = [int(part) for part in text.split(",") if part]
    if any(size < 1 for size in found):
        raise argparse.ArgumentTypeError(f"{min(found)} is below 1")
    return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The command; its table goes to the log, its figures are returned and logged as JSON."""
    parser = argparse.ArgumentParser(description="Compare kernels that keep rows apart with fast.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rows", type=_sizes, default=[1, 16, 512], help="of ops; empty: none")
    parser.add_argument("--sequences", type=_sizes, default=[1, 16], help="that decode")
    parser.add_argument("--prefill", type=_sizes, default=[512], help="prompts, in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence, at least 2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--window-ms", type=float, default=50.0, help="of one measured op")
    given = parser.parse_args(argv)
    if given.tokens < 2 or given.repeats < 1:
        parser.error("--tokens is at least 2 and --repeats at least 1")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sizes: dict[str, Any] = {
        "max_num_seqs": max(given.sequences, default=1),
        "nextn": 0,
        "prefix_reuse": "off",
    }
    engines = tuple(LLM(given.model, batch_invariant=kept, **sizes) for kept in (False, True))
    costs = op_costs(
        engines[0].config, given.rows, repeats=given.repeats, window_s=given.window_ms / 1e3
    )
    costs += engine_costs(
        (engines[0], engines[1]),
        given.sequences,
        given.prefill,
        tokens=given.tokens,
        repeats=given.repeats,
    )
    for line in table(costs):
        LOG.info(line)
    figures = {
        "model": given.model,
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "costs": [asdict(cost) | {"speed": cost.speed} for cost in costs],
    }
    LOG.info(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
