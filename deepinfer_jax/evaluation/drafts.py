"""How good a drafter is: accept length, acceptance by place, and whether its confidence is right.

Everything is computed from the blocks of drafts that were verified, with every draft offered
(drafting specification, sections 2.4, 3.4 and 4.5), on the host.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.sampling.calibration import (
    calibration_error,
    fit_temperatures,
    ranking_area,
)
from deepinfer_jax.sampling.lengths import calibrated
from deepinfer_jax.sampling.verified import VerifiedBlock

Blocks = Sequence[VerifiedBlock]
"""Those of one answer."""


@dataclass(frozen=True)
class DraftStatistics:
    """What happened to the drafts of some answers. Numbers that nothing was counted for are NaN.

    Attributes:
        prompts: answers. steps: blocks that were verified. drafts: of them, in all.
        length: tokens that a step with drafts gives, on average: one more than it keeps.
        acceptance: per place, the share of drafts that are kept once all before them are.
        calibration_error: expected calibration error (20 bins of equal width) of the confidences
            at temperature 1, of drafts before which all were kept; 0 to 1.
        ranking_area: area under the ROC curve of the same, ties counted half.
    """

    prompts: int
    steps: int
    drafts: int
    length: float
    acceptance: tuple[float, ...]
    calibration_error: float
    ranking_area: float


@dataclass(frozen=True)
class Judgement:
    """One line about a drafter.

    Attributes:
        skill: whose answers. statistics: of all of them.
        before, after: calibration error of the judged half of the prompts, at temperature 1 and
            at the temperatures that were fitted on the other half.
    """

    skill: str
    statistics: DraftStatistics
    before: float
    after: float


@dataclass(frozen=True)
class Report:
    """What is known of a drafter.

    Attributes:
        temperatures: of the confidence of each place, by sequential temperature scaling; None
            without a block to fit them on.
        judgements: one per skill, and then of "all".
    """

    temperatures: tuple[float, ...] | None
    judgements: tuple[Judgement, ...]


def draft_statistics(answers: Sequence[Blocks], places: int) -> DraftStatistics:
    """Statistics of answers whose drafter makes `places` drafts a block."""
    blocks = [block for answer in answers for block in answer]
    reached, kept = np.zeros((2, places), np.int64)
    for block in blocks:
        reached[: block.judged] += 1
        kept[: block.accepted] += 1
    steps = len(blocks)
    with np.errstate(invalid="ignore"):
        acceptance = kept / reached
    logits, _, label = _reached(blocks)
    confidence = calibrated(logits, np.ones(1))
    return DraftStatistics(
        prompts=len(answers),
        steps=steps,
        drafts=sum(block.offered for block in blocks),
        length=1 + int(kept.sum()) / steps if steps else math.nan,
        acceptance=tuple(acceptance.tolist()),
        calibration_error=calibration_error(confidence, label) if len(label) else math.nan,
        ranking_area=ranking_area(confidence, label) if len(label) else math.nan,
    )


def scaling(answers: Iterable[Blocks], places: int) -> tuple[float, ...] | None:
    """Temperatures of sequential temperature scaling, or None when no block can be used.

    It takes blocks of which every draft has a label: all `places` were offered, and the sequence
    did not end before the last of them.
    """
    whole = [
        block
        for answer in answers
        for block in answer
        if block.logits is not None
        and block.offered == places
        and (not block.ended or block.accepted == places)
    ]
    if not whole:
        return None
    accepted = np.array([block.accepted for block in whole])
    labels = np.arange(places) < accepted[:, None]
    return tuple(fit_temperatures(np.array([b.logits for b in whole]), labels).tolist())


def scaled_error(answers: Iterable[Blocks], temperatures: Sequence[float]) -> float:
    """Calibration error of the drafts before which all were kept, at a temperature per place.

    NaN without any.
    """
    logits, place, label = _reached([block for answer in answers for block in answer])
    if not len(label):
        return math.nan
    return calibration_error(calibrated(logits, np.asarray(temperatures)[place]), label)


def halves(prompts: int, seed: int) -> np.ndarray:
    """Which prompts scaling is judged on, bool [prompts]: the larger half, by a seeded lot."""
    judged = np.ones(prompts, bool)
    judged[np.random.default_rng(seed).permutation(prompts)[: prompts // 2]] = False
    return judged


def report(skills: Mapping[str, Sequence[Blocks]], places: int, seed: int) -> Report:
    """All about a drafter.

    Args:
        skills: the answers of each skill. places: drafts of a block.
        seed: of the split into the half that temperatures are fitted on and the judged one.
    """
    every = [answer for answers in skills.values() for answer in answers]
    judged = halves(len(every), seed)
    fitted = scaling([a for a, j in zip(every, judged, strict=True) if not j], places)
    lines, first = [], 0
    for skill, answers in [*skills.items(), ("all", every)]:
        first = 0 if skill == "all" else first
        mine = judged[first : first + len(answers)]
        first += len(answers)
        shown = [a for a, j in zip(answers, mine, strict=True) if j]
        lines.append(
            Judgement(
                skill=skill,
                statistics=draft_statistics(answers, places),
                before=scaled_error(shown, [1.0] * places),
                after=math.nan if fitted is None else scaled_error(shown, fitted),
            )
        )
    return Report(fitted, tuple(lines))


def _reached(blocks: Blocks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of drafts before which all were kept: logits float64 [m], places int64 [m], bool kept [m]."""
    found = [
        (block.logits[place], place, place < block.accepted)
        for block in blocks
        if block.logits is not None
        for place in range(block.judged)
    ]
    logits, place, label = zip(*found, strict=True) if found else ((), (), ())
    return np.array(logits, np.float64), np.array(place, np.int64), np.array(label, bool)
