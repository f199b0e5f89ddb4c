"""The table of skills: name -> generator, and samples from (seed, index) alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills import (
    arithmetic,
    copying,
    facts,
    follow_up,
    lists,
    lookup,
    records,
    tool_calls,
)
from deepinfer_jax.skills.sample import Sample, Split, split_of

Family = Callable[[np.random.Generator, float, Split], Sample]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "sum_worked": arithmetic.worked,
        "sum_direct": arithmetic.direct,
        "lookup": lookup.lookup,
        "sort": lists.sort,
        "reverse": lists.reverse,
        "count": lists.count,
        "json": records.record,
        "tool_call": tool_calls.call,
        "tool_reply": tool_calls.reply,
        "follow_up": follow_up.follow_up,
        "facts": facts.fact,
        "copy": copying.copying,
    }
)
"""Skill -> (generator, level in 0..1, split) -> sample. "copy" is for training only."""

SKILLS: tuple[str, ...] = tuple(FAMILIES)
"""Skill names in the order of their numbers in training batches."""


def sample(skill: str, seed: int, index: int, level: float = 1.0) -> Sample:
    """Sample `index` of a seed; the seed decides whether it is a training or held-out prompt.

    Raises ConfigError for an unknown skill or a negative seed.
    """
    if skill not in FAMILIES:
        raise ConfigError(
            f"There is no skill {skill!r}.",
            f"The skills are {', '.join(SKILLS)}.",
            "Use one of these.",
        )
    split = split_of(seed)
    return FAMILIES[skill](np.random.default_rng((seed, index)), level, split)
