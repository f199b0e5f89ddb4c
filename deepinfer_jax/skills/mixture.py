"""What training sees: skills in their shares, with system messages and efforts now and then."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deepinfer_jax.skills.copying import copying
from deepinfer_jax.skills.draws import chance, pick
from deepinfer_jax.skills.families import FAMILIES, SKILLS
from deepinfer_jax.skills.sample import Sample

SHARES = {
    "sum_worked": 0.14,
    "sum_direct": 0.11,
    "lookup": 0.20,
    "sort": 0.13,
    "reverse": 0.08,
    "count": 0.07,
    "json": 0.10,
    "tool_call": 0.045,
    "tool_reply": 0.01,
    "follow_up": 0.10,
    "facts": 0.07,
}
"""Shares of samples among the skills other than copying; short answers get more than their due."""

_COPY_EASY, _COPY_FULL = 0.25, 0.06
_SYSTEM_SHARE, _EFFORT_SHARE = 0.06, 0.16
_SYSTEMS = (
    "You are nano, a small assistant.",
    "You are a helpful assistant.",
    "Be brief.",
    "Answer the user.",
)


def shares(level: float) -> dict[str, float]:
    """Share of every skill at difficulty `level`: copying falls from a quarter to a twentieth."""
    copy = _COPY_EASY + (_COPY_FULL - _COPY_EASY) * min(max(level, 0.0), 1.0)
    total = sum(SHARES.values())
    return {s: (1 - copy) * SHARES[s] / total if s in SHARES else copy for s in SKILLS}


def draw(
    rng: np.random.Generator, level: float, count: int, vocabulary: Sequence[str] = ()
) -> list[Sample]:
    """`count` training samples; `vocabulary` as in `copying.copying`."""
    names = rng.choice(len(SKILLS), count, p=list(shares(level).values())).tolist()
    return [_vary(rng, _one(rng, SKILLS[n], level, vocabulary)) for n in names]


def _one(rng: np.random.Generator, skill: str, level: float, vocabulary: Sequence[str]) -> Sample:
    if skill == "copy":
        return copying(rng, level, "train", vocabulary)
    return FAMILIES[skill](rng, level, "train")


def _vary(rng: np.random.Generator, sample: Sample) -> Sample:
    roll = float(rng.random())
    if roll < _SYSTEM_SHARE:
        system = {"role": "system", "content": pick(rng, _SYSTEMS)}
        return replace(sample, messages=(system, *sample.messages))
    if sample.thinking and chance(rng, _EFFORT_SHARE):
        return replace(sample, effort=pick(rng, ("low", "max", int(rng.integers(1, 101)))))
    return sample
