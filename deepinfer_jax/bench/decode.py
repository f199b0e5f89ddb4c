"""`python -m deepinfer_jax.bench.decode`: tokens a second of one model on this machine.

No other engine runs this network, so the figures stand against a floor: the bytes of the weights
that a token must read, over the bandwidth of a large copy measured in the same process.
"""

import argparse
import dataclasses
import json
import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from deepinfer_jax.llm import LLM
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams

LOG = logging.getLogger("deepinfer_jax.bench")
_COPY_BYTES = 1 << 28
_REPEATS = 5


def copy_bandwidth() -> float:
    """Bytes read plus written a second by a copy that no cache holds; median of five."""
    source = np.ones(_COPY_BYTES // 4, np.float32)
    target = np.empty_like(source)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return 2 * _COPY_BYTES / statistics.median(times)


def weight_bytes(llm: LLM, rows: int) -> int:
    """Bytes of the weights that a decode step of `rows` sequences reads at least.

    Of the routed experts at most `rows` times the experts a token takes; of the embedding and the
    Engram tables a few rows, which are left out.
    """
    params, config = llm.assembled.params, llm.config
    chosen = min(rows * config.num_experts_per_tok, config.n_routed_experts)
    total = params.head.nbytes
    for run in params.runs:
        experts = sum(leaf.nbytes for leaf in jax.tree.leaves(run.moe.experts))
        total += sum(leaf.nbytes for leaf in jax.tree.leaves(run)) - experts
        total += experts * chosen // config.n_routed_experts
    return total


def finished(outputs: Sequence[RequestOutput]) -> None:
    """Raise the first error among the outputs: a time without the work would be no measurement."""
    for output in outputs:
        if output.error is not None:
            raise output.error


def measure(llm: LLM, batch: int, tokens: int) -> dict[str, float]:
    """Decode of `batch` sequences: tokens/s, milliseconds a step, share of time in host code.

    `tokens` of each sequence, at least 2: the first comes from the prefill. Raises the error of a
    request that cannot run.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    finished(llm.generate(["hello"] * batch, params))
    steps, shares = [], []
    for _ in range(_REPEATS):
        before = dataclasses.replace(llm.meter)
        finished(llm.generate(["hello"] * batch, params))
        after = llm.meter
        spent = after.decode_s - before.decode_s
        waited = after.decode_wait_s - before.decode_wait_s
        steps.append(spent / (tokens - 1))
        shares.append(1 - waited / spent)
    step = statistics.median(steps)
    return {
        "batch": batch,
        "tokens_s": batch / step,
        "step_ms": 1e3 * step,
        "host_share": statistics.median(shares),
        "weight_mb": weight_bytes(llm, batch) / 1e6,
    }


def prefill(llm: LLM, tokens: int) -> float:
    """Prompt tokens a second; median of five. Raises the error of a prompt that cannot run."""
    ids = [3 + i % 200 for i in range(tokens)]
    params = SamplingParams(max_tokens=1, temperature=0)
    finished(llm.generate([ids], params))
    times = []
    for _ in range(_REPEATS):
        before = llm.meter.prefill_s
        finished(llm.generate([ids], params))
        times.append(llm.meter.prefill_s - before)
    return tokens / statistics.median(times)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def _batches(text: str) -> list[int]:
    return [_at_least(1)(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The command; its table goes to the log, its figures are returned and logged as JSON."""
    parser = argparse.ArgumentParser(description="Time decode and prefill of a model.")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--batches", type=_batches, default=[1, 16], help="sizes, as in 1,16")
    parser.add_argument(
        "--tokens", type=_at_least(2), default=64, help="of each sequence, the prefill's among them"
    )
    parser.add_argument(
        "--prompt", type=_at_least(1), default=2000, help="prompt tokens of a prefill"
    )
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    bandwidth = copy_bandwidth()
    rows = []
    for batch in given.batches:
        llm = LLM(given.model, max_num_seqs=batch)
        row = measure(llm, batch, given.tokens)
        row["floor_ms"] = 1e3 * row["weight_mb"] * 1e6 / bandwidth
        row["over_floor"] = row["step_ms"] / row["floor_ms"]
        rows.append(row)
        LOG.info(
            "batch %d: %.0f tokens/s, %.2f ms a step, %.1f %% host, floor %.2f ms (%.1fx)",
            batch,
            row["tokens_s"],
            row["step_ms"],
            100 * row["host_share"],
            row["floor_ms"],
            row["over_floor"],
        )
    figures = {
        "model": given.model,
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "copy_gb_s": bandwidth / 1e9,
        "decode": rows,
        "prefill_tokens_s": prefill(LLM(given.model), given.prompt),
    }
    LOG.info("prefill of %d tokens: %.0f tokens/s", given.prompt, figures["prefill_tokens_s"])
    LOG.info(json.dumps(figures))
    return figures


if __name__ == "__main__":
    main()
