"""What training sees: skills in their shares, with system messages and efforts now and then."""

from collections.abc import Mapping, Sequence
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


def shares(level: float, parts: Mapping[str, float] = SHARES) -> dict[str, float]:
    """Share of every skill at difficulty `level`: copying falls from 0.25 to 0.06.

    `parts` are the relative shares of the others, as `SHARES`.
    """
    copy = _COPY_EASY + (_COPY_FULL - _COPY_EASY) * min(max(level, 0.0), 1.0)
    total = sum(parts.values())
    return {s: (1 - copy) * parts[s] / total if s in parts else copy for s in SKILLS}


def draw(
    rng: np.random.Generator,
    level: float,
    count: int,
    vocabulary: Sequence[str] = (),
    parts: Mapping[str, float] = SHARES,
) -> list[Sample]:
    """`count` training samples; `vocabulary` as in `copying.copying`, `parts` as in `shares`."""
    names = rng.choice(len(SKILLS), count, p=list(shares(level, parts).values())).tolist()
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
