"""Tokens a second of mixed requests, continuous against static batches.

`python -m deepinfer_jax.bench.throughput [--model nano] [--sequences 1,16,64]`

Requests have prompts of 16 to 400 tokens and 8 to 120 output tokens. "Static" runs them in groups
of 16, the next group when the last of the one before has ended; "plain" and "overlapped" are the
engine's two loops with a slot for each.
"""

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer_jax.bench.decode import finished
from deepinfer_jax.llm import LLM
from deepinfer_jax.ops.device import devices
from deepinfer_jax.sampling_params import SamplingParams

LOG = logging.getLogger("deepinfer_jax.bench")
_GROUP, _REPEATS = 16, 3


def requests(count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of `count` requests, the same in every run."""
    rng = np.random.default_rng(0)
    prompts, params = [], []
    for _ in range(count):
        prompts.append(rng.integers(3, vocab, int(rng.integers(16, 400))).tolist())
        tokens = int(rng.integers(8, 120))
        params.append(SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    return prompts, params


def timed(llm: LLM, count: int, group: int) -> tuple[float, float]:
    """Output tokens a second of `count` requests in groups, and the share of time spent waiting."""
    prompts, params = requests(count, llm.config.vocab_size)
    speeds, waits = [], []
    for turn in range(_REPEATS + 1):
        before, start = llm.meter, time.perf_counter()
        for at in range(0, count, group):
            part = slice(at, at + group)
            finished(llm.generate(None, params[part], prompts[part]))
        spent, after = time.perf_counter() - start, llm.meter
        if turn:  # the first one compiles
            speeds.append((after.output_tokens - before.output_tokens) / spent)
            waits.append((after.wait_s - before.wait_s) / spent)
    return statistics.median(speeds), statistics.median(waits)


def measure(model: str, count: int, kept: str) -> dict[str, Any]:
    """One line of the table; `kept` is a folder of programs, which both loops share."""
    row: dict[str, Any] = {"sequences": count}
    for name, slots, group, overlap in (
        ("static", min(count, _GROUP), _GROUP, False),
        ("plain", count, count, False),
        ("overlapped", count, count, True),
    ):
        llm = LLM(model, max_num_seqs=slots, overlap=overlap, compile_cache_dir=kept)
        row[name], row[f"{name}_wait"] = timed(llm, count, group)
    LOG.info(
        f"{count} sequences: static {row['static']:.0f}, plain {row['plain']:.0f} "
        f"({100 * row['plain_wait']:.0f} % waiting), overlapped {row['overlapped']:.0f} "
        f"tokens/s ({100 * row['overlapped_wait']:.0f} %), "
        f"{row['overlapped'] / row['static']:.2f} x static"
    )
    return row


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The command; its table goes to the log, its figures are returned and logged as JSON."""
    parser = argparse.ArgumentParser(description="Throughput of mixed requests.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--sequences", default="1,16,64")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as kept:
        rows = [measure(given.model, int(count), kept) for count in given.sequences.split(",")]
    machine = f"{platform.machine()}, {devices()[0].device_kind}"
    LOG.info(json.dumps({"model": given.model, "machine": machine, "rows": rows}))
    return rows


if __name__ == "__main__":
    main()
