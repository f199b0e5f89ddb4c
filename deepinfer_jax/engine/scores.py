"""Which rows of a step are scored, and their results brought to their sequences."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepinfer_jax.engine.plan import Plan
from deepinfer_jax.engine.sequence import Sequence as Sample
from deepinfer_jax.engine.sequence import not_finite

# (part of a plan, number of its sequence)
Parts = list[tuple[int, int]]


def scored_parts(plan: Plan, samples: Mapping[int, Sample]) -> tuple[Parts, np.ndarray | None]:
    """The prompt parts with rows to score, and for `pack` where those of each part begin."""
    found: Parts = []
    score_from = None
    for part in np.flatnonzero(plan.prefill).tolist():
        number = int(plan.running.request[plan.slot[part]])
        sample, start = samples[number], int(plan.start[part])
        scores = sample.scores
        if scores is None or scores.complete or start >= sample.score_from + len(scores.token):
            continue
        if start + int(plan.count[part]) > sample.score_from:
            if score_from is None:
                score_from = np.full(len(plan.slot), -1, np.int32)
            score_from[part] = sample.score_from
            found.append((part, number))
    return found, score_from


def take_scores(
    plan: Plan, parts: Sequence[tuple[int, int]], made: Any, samples: Mapping[int, Sample]
) -> None:
    """Give a collected step's `PromptScores` `made` to those that asked for them.

    A sequence whose logits are no numbers fails, and runs on to the token that it draws: there its
    slot is given back.
    """
    for part, number in parts:
        sample = samples.get(number)
        if sample is None or sample.finished or sample.scores is None:
            continue
        first, count = int(plan.count[:part].sum()), int(plan.count[part])
        start = int(plan.start[part])
        before = max(sample.score_from - start, 0)
        bad = np.flatnonzero(made.bad[first + before : first + count])
        # A prompt that is run again has its outputs behind it; those are not scored.
        bad = bad[bad + before + start < sample.score_from + len(sample.scores.token)]
        if len(bad):
            sample.fail(not_finite(start + before + int(bad[0]) + 1))
            continue
        rows = slice(first + before, first + count)
        sample.scores.put(start + before - sample.score_from, made, rows)
