"""Offline throughput: the same mixed requests again and again, warm-up apart, every repeat kept.

`deepinfer bench` is its command. A repeat inside which something was compiled is no measurement: it
stays in the record, marked as invalid, and counts in no median.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from deepinfer_jax.bench.decode import finished
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.engine import Meter
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams

WINDOW_S = 10.0  # a steady window lasts so long at least, unless its size was given
WARM_UPS = 4
FIGURES = ("output_tokens_s", "prompt_tokens_s", "steps", "wait_share", "host_us_step", "wall_s")
_FIRST_ID = 3  # the ids below it begin, end and pad sequences

Tell = Callable[[str, int, int], None]


class Engine(Protocol):
    """What is measured: an `LLM`."""

    config: ModelConfig

    @property
    def meter(self) -> Meter:
        """Counts and seconds so far."""
        ...

    def generate(
        self,
        prompts: None,
        sampling_params: Sequence[SamplingParams],
        prompt_token_ids: Sequence[Sequence[int]],
        use_tqdm: Callable[[int, int], None],
    ) -> list[RequestOutput]:
        """Answer all."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Between which lengths, both included, prompts and outputs are drawn, in tokens.

    Attributes:
        prompt, output: least and most.
        spread: "even", or "log": as many between 10 and 20 as between 100 and 200, so that a few
            long ones stand among many short ones, as in most traffic.
    """

    prompt: tuple[int, int]
    output: tuple[int, int]
    spread: str = "even"

    def draw(self, seed: int, count: int) -> list[tuple[int, int]]:
        """(prompt, output) lengths of `count` requests; a longer list begins with a shorter one."""
        rng = np.random.default_rng(seed)
        return [(self._one(rng, self.prompt), self._one(rng, self.output)) for _ in range(count)]

    def _one(self, rng: np.random.Generator, ends: tuple[int, int]) -> int:
        if self.spread == "even":
            return int(rng.integers(*ends, endpoint=True))
        return int(np.exp(rng.uniform(np.log(ends[0]), np.log(ends[1] + 1))))


@dataclass(frozen=True)
class Repeat:
    """One pass over all requests.

    Attributes:
        wall_s: seconds from the first request in to the last one out.
        prompt_tokens, output_tokens, steps: counts.
        wait_s: seconds in which the host waited for the device.
        prefill_s: seconds of steps that had prompt rows.
        compile_s: seconds of compiling inside the window; more than none makes it invalid.
        preempted: sequences that gave up their pages.
    """

    wall_s: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    wait_s: float
    prefill_s: float
    compile_s: float
    preempted: int

    @property
    def valid(self) -> bool:
        """Whether nothing was compiled."""
        return self.compile_s == 0

    def as_json(self) -> dict[str, Any]:
        """Counts, seconds and what follows from them, as plain JSON values."""
        return asdict(self) | {
            "valid": self.valid,
            "prompt_tokens_s": self.prompt_tokens / self.wall_s,
            "output_tokens_s": self.output_tokens / self.wall_s,
            "wait_share": self.wait_s / self.wall_s,
            "host_us_step": 1e6 * (self.wall_s - self.wait_s) / max(self.steps, 1),
        }


def measure(
    llm: Engine,
    lengths: Lengths,
    *,
    requests: int | None,
    least: int,
    repeats: int,
    seed: int,
    group: int | None = None,
    tell: Tell = lambda what, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Figures of one engine, as plain JSON values.

    Every repeat has the same lengths and other token ids, so that no prompt is one that was seen.

    Args:
        llm: the engine.
        lengths: of the requests.
        requests: how many; None for as many as take `WINDOW_S`.
        least: how many at least when they are not given.
        repeats: how often they are run after the warm-up.
        seed: of lengths and ids.
        group: requests of a static batch, which must all end before the next begins; None hands
            all to the engine at once.
        tell: called with (what is being done, done, all) requests.
        clock: seconds.

    Raises:
        DeepInferError: the error of a request that cannot run.
    """
    count, passes, compile_s = requests or least, 0, 0.0
    while True:
        warm = _run(llm, lengths, count, seed, passes, group, _named("warm-up", tell), clock)
        passes, compile_s = passes + 1, compile_s + warm.compile_s
        if warm.compile_s and passes < WARM_UPS:
            continue
        if requests is None and warm.wall_s < WINDOW_S and passes < WARM_UPS:
            # A little more than needed, and programs for the longer run are compiled by it.
            count = math.ceil(count * 1.1 * WINDOW_S / max(warm.wall_s, 1e-3))
            requests = count
            continue
        break
    done = [
        _run(llm, lengths, count, seed, passes + i, group, _named(f"repeat {i + 1}", tell), clock)
        for i in range(repeats)
    ]
    rows = [repeat.as_json() for repeat in done]
    valid = [row for row in rows if row["valid"]]
    return {
        "requests": count,
        "warm_up": {"passes": passes, "compile_s": compile_s},
        "repeats": rows,
        "valid": len(valid),
        "median": {n: statistics.median(r[n] for r in valid) for n in FIGURES} if valid else None,
        "spread": {n: [min(r[n] for r in valid), max(r[n] for r in valid)] for n in FIGURES}
        if valid
        else None,
    }


def _named(what: str, tell: Tell) -> Callable[[int, int], None]:
    return lambda done, total: tell(what, done, total)


def _run(
    llm: Engine,
    lengths: Lengths,
    count: int,
    seed: int,
    turn: int,
    group: int | None,
    tell: Callable[[int, int], None],
    clock: Callable[[], float],
) -> Repeat:
    """One pass; `turn` decides the ids."""
    drawn = lengths.draw(seed, count)
    usable = np.arange(_FIRST_ID, llm.config.vocab_size)
    if llm.config.image_token_id is not None:
        usable = usable[usable != llm.config.image_token_id]
    rng = np.random.default_rng((seed, turn))
    prompts = [rng.choice(usable, n).tolist() for n, _ in drawn]
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for _, m in drawn]
    tell(0, count)
    before, start = llm.meter, clock()
    for at in range(0, count, group or count):
        part = slice(at, at + (group or count))
        finished(
            llm.generate(None, params[part], prompts[part], lambda n, _, at=at: tell(at + n, count))
        )
    wall, after = clock() - start, llm.meter
    return Repeat(
        wall_s=wall,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        output_tokens=after.output_tokens - before.output_tokens,
        steps=after.steps - before.steps,
        wait_s=after.wait_s - before.wait_s,
        prefill_s=after.prefill_s - before.prefill_s,
        compile_s=after.compile_s - before.compile_s,
        preempted=after.preempted - before.preempted,
    )
