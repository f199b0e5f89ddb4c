"""What drafts are worth: the same held-out prompts with them and without, in one process.

`python -m deepinfer_jax.bench.drafting --sequences 1,16` answers prompts of the suite's skills in
turn, greedily, as often as told, the two engines taking turns; what compiled is run before. A
speed is a ratio of medians. The other engine's answers are the floor of correctness: greedy tokens
with drafts are those without wherever a row's bits do not depend on the step's shape.
"""

import argparse
import json
import logging
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from deepinfer_jax.llm import LLM
from deepinfer_jax.ops.device import devices
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.skills.evaluation import SUITE, prompt_ids

LOG = logging.getLogger(__name__)
SKILLS = ("sum_worked", "facts", "sort", "json", "tool_call", "follow_up", "reverse", "sum_direct")


@dataclass(frozen=True)
class Speed:
    """One comparison.

    Attributes:
        sequences: that run at the same time. skill: of the prompts, or "all".
        tokens: of the answers; later: of them, those after an answer's first.
        steps: of sequences, that gave those.
        without_s, with_s: medians of all steps' seconds, prompts included.
        without_decode_s, with_decode_s: of those without prompt rows.
        different: answers that drafts changed.
    """

    sequences: int
    skill: str
    tokens: int
    later: int
    steps: int
    without_s: float
    with_s: float
    without_decode_s: float
    with_decode_s: float
    different: int

    @property
    def length(self) -> float:
        """Tokens that a step of a sequence gives after its first, NaN without such a step."""
        return self.later / self.steps if self.steps else float("nan")

    @property
    def speed(self) -> float:
        """How many times as fast drafts are, prompts included."""
        return self.without_s / self.with_s

    @property
    def decode_speed(self) -> float:
        """How many times as fast the steps without prompts are."""
        return self.without_decode_s / self.with_decode_s


@dataclass(frozen=True)
class _Run:
    wall_s: float
    decode_s: float
    outputs: list[RequestOutput]


def _answer(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> _Run:
    before, begin = llm.meter, time.perf_counter()
    outputs = llm.generate(None, [params] * len(prompts), prompts)
    wall, after = time.perf_counter() - begin, llm.meter
    compiled = after.compile_s - before.compile_s
    return _Run(wall - compiled, after.decode_s - before.decode_s, outputs)


def compare(
    engines: tuple[LLM, LLM],
    sequences: int,
    skill: str,
    prompts: Sequence[list[int]],
    tokens: int,
    repeats: int,
) -> Speed:
    """Answer `prompts` with both engines, without and with drafts, `repeats` times in turn."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    runs: tuple[list[_Run], list[_Run]] = ([], [])
    for repeat in range(1 + repeats):
        for llm, kept in zip(engines, runs, strict=True):
            run = _answer(llm, prompts, params)
            if repeat:
                kept.append(run)
    plain, drafted = (kept[-1].outputs for kept in runs)
    answers = [output.outputs[0] for output in drafted]
    count = sum(len(answer.token_ids) for answer in answers)
    later = count - len(answers)

    def median(side: int, name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs[side])

    return Speed(
        sequences=sequences,
        skill=skill,
        tokens=count,
        later=later,
        steps=later - sum(answer.accepted for answer in answers),
        without_s=median(0, "wall_s"),
        with_s=median(1, "wall_s"),
        without_decode_s=median(0, "decode_s"),
        with_decode_s=median(1, "decode_s"),
        different=sum(
            a.outputs[0].token_ids != b.token_ids for a, b in zip(plain, answers, strict=True)
        ),
    )


def total(rows: Sequence[Speed]) -> Speed:
    """All skills of one number of sequences together."""
    steps, tokens = sum(r.steps for r in rows), sum(r.tokens for r in rows)
    return Speed(
        sequences=rows[0].sequences,
        skill="all",
        tokens=tokens,
        later=sum(r.later for r in rows),
        steps=steps,
        without_s=sum(r.without_s for r in rows),
        with_s=sum(r.with_s for r in rows),
        without_decode_s=sum(r.without_decode_s for r in rows),
        with_decode_s=sum(r.with_decode_s for r in rows),
        different=sum(r.different for r in rows),
    )


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The command; its table goes to the log, with --json its figures as a last line."""
    parser = argparse.ArgumentParser(description="Speed with drafts over speed without.")
    parser.add_argument("--sequences", default="1,16", help="numbers of them, with commas between")
    parser.add_argument("--nextn", type=int, default=5, help="drafts of a step")
    parser.add_argument("--varlen", action="store_true", help="propose and verify as many as pay")
    parser.add_argument("--prompts", type=int, default=6, help="of each skill, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skills", default=",".join(SKILLS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    LOG.info(f"{platform.machine()}, {devices()[0].device_kind}, jax {jax.__version__}")
    wanted = given.skills.split(",")
    entries = [entry for entry in SUITE if entry.name in wanted]
    rows: list[Speed] = []
    for sequences in map(int, given.sequences.split(",")):
        common = [*given.set, f"engine.max_num_seqs={sequences}"]
        drafts = [f"engine.nextn={given.nextn}", f"engine.varlen={str(given.varlen).lower()}"]
        engines = (
            LLM(overrides=[*common, "engine.nextn=0"]),
            LLM(overrides=[*common, *drafts]),
        )
        for llm in engines:
            llm.prepare(sequences=sequences)  # side by side, which compiling as needed is not
        done = []
        for entry in entries:
            count = max(given.prompts, sequences)
            prompts = [prompt_ids(s, engines[0].tokenizer) for s in entry.samples(count=count)]
            row = compare(engines, sequences, entry.name, prompts, entry.max_tokens, given.repeats)
            done.append(row)
            _tell(row)
        _tell(total(done))
        rows += [*done, total(done)]
    figures = [
        asdict(row) | {"length": row.length, "speed": row.speed, "decode_speed": row.decode_speed}
        for row in rows
    ]
    if given.json:
        LOG.info(json.dumps(figures))
    return figures


def _tell(row: Speed) -> None:
    LOG.info(
        f"{row.sequences:4d} {row.skill:12s} {row.tokens:6d} tokens, {row.length:.2f} a step, "
        f"{row.without_s:.3f} s without and {row.with_s:.3f} s with drafts: {row.speed:.2f} x, "
        f"without prompts {row.decode_speed:.2f} x; {row.different} answers differ"
    )


if __name__ == "__main__":
    main()
