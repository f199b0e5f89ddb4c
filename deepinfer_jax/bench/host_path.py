"""`python -m deepinfer_jax.bench.host_path`: what a decode step costs on the host before launch.

That is the plan, its new pages and its arrays, for 1, 64 and 256 sequences that decode; one core.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deepinfer_jax.engine.buckets import Draws, pack, plan_buckets
from deepinfer_jax.engine.pages import PagePool
from deepinfer_jax.engine.plan import Limits, Running, View, Waiting, place
from deepinfer_jax.engine.planner import plan

LOG = logging.getLogger("deepinfer_jax.bench")
_STEPS, _WARM_UP = 2000, 100


def measure(sequences: int, steps: int = _STEPS) -> dict[str, float]:
    """Median and 99th percentile microseconds of `steps` decode steps; pages included."""
    length = steps + _WARM_UP + 300
    limits = Limits(
        slots=sequences,
        rows=max(2048, 2 * sequences),
        pages=1 + sequences * (length // 128 + 1),
        max_model_len=length,
        table_pages=length // 128 + 1,
        updates=2 * sequences + 16,
    )
    buckets, pool = plan_buckets(limits), PagePool(limits.pages)
    draws = Draws.greedy(sequences)
    # Prompts of different lengths, so that their pages fill up at different times.
    waiting = [Waiting(request=i, prompt=1 + i % 128, limit=length) for i in range(sequences)]
    run, spent = Running.empty(sequences), []
    prompts = dict.fromkeys(range(sequences), np.zeros(128, np.int32))
    view = View(
        step=0,
        retired=0,
        now=0.0,
        running=run,
        waiting=waiting,
        allocatable=0,
        pending=0,
        frees=lambda slot: 0,
    )
    step = 0
    while len(spent) < steps + _WARM_UP:
        step += 1
        begin = time.perf_counter_ns()
        view = replace(view, step=step, running=run, allocatable=pool.allocatable, waiting=waiting)
        made = plan(view, limits, buckets)
        made = place(made, pool.allocate(made.fresh))
        pack(made, draws, prompts)
        run = made.running
        if not waiting and not made.prefill.any():
            spent.append((time.perf_counter_ns() - begin) / 1e3)
        admitted = {request for request, _ in made.admitted}
        waiting = [w for w in waiting if w.request not in admitted]
    spent = sorted(spent[_WARM_UP:])
    return {
        "sequences": sequences,
        "median_us": statistics.median(spent),
        "p99_us": spent[len(spent) * 99 // 100],
    }


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """The command; its table, or with --json its figures, go to the log."""
    parser = argparse.ArgumentParser(description="Time planning and packing of decode steps.")
    parser.add_argument("--sequences", default="1,64,256")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    figures = [measure(int(n)) for n in given.sequences.split(",")]
    if given.json:
        LOG.info(json.dumps(figures))
    else:
        LOG.info("| sequences | plan + pack, median | 99th percentile |")
        LOG.info("| --- | --- | --- |")
        for f in figures:
            LOG.info(f"| {f['sequences']} | {f['median_us']:.0f} us | {f['p99_us']:.0f} us |")
    return figures


if __name__ == "__main__":
    main()
