"""Whether confidences mean what they say, and temperatures that make them: NumPy, on the host.

Confidences are of each draft given those before it; labels say whether a draft and all before it
were accepted. Both must come from steps that verified every draft: a draft that was left out has
no label.
"""

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.lengths import calibrated, survival

TEMPERATURES = np.logspace(-1, 1, 41)
FIT_BINS, REPORT_BINS, ORDER_BINS = 15, 20, 1000
_EDGE = 1e-8
_SMALLEST, _CLOSEST = 1e-30, 2.0**-25  # to 0; to 1, where float32 ends


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """One temperature per place, float64 [g]: sequential temperature scaling.

    Place after place, of 41 temperatures from 0.1 to 10, evenly spaced in their logarithm, the
    first is taken that has the smallest calibration error (15 bins) of the running product, whose
    earlier factors are calibrated already (draft model specification, section 3.4).

    Args:
        logits: [n, g], of the confidence head, before any temperature.
        accepted: bool [n, g], the draft and all before it were accepted.

    Raises:
        ConfigError: no data, unequal shapes, or an accepted draft after one that was not.
    """
    _check(logits, accepted)
    logits = np.asarray(logits, np.float64)
    before = np.ones(logits.shape[0])
    chosen = []
    for place in range(logits.shape[1]):
        tried = [before * calibrated(logits[:, place], t) for t in TEMPERATURES[:, None]]
        errors = [calibration_error(p, accepted[:, place], FIT_BINS) for p in tried]
        best = int(np.argmin(errors))
        chosen.append(best)
        before = tried[best]
    return TEMPERATURES[chosen]


def uncalibrated(confidence: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """The logits [..., g] behind confidences that `sampling.lengths.calibrated` made of them.

    float64. A confidence that its float type rounded to 0 or 1 gives the logit of the nearest
    number inside: so float32 tells logits apart up to about 16 times their temperature.

    Args:
        confidence: [..., g], in 0..1.
        temperature: [g] or [], those that it was made with.
    """
    confidence = np.clip(np.asarray(confidence, np.float64), _SMALLEST, 1 - _CLOSEST)
    return temperature * (np.log(confidence) - np.log1p(-confidence))


def calibration_error(probability: np.ndarray, label: np.ndarray, bins: int = REPORT_BINS) -> float:
    """Expected calibration error of [n] probabilities, 0 to 1.

    Over bins of equal width, the share of a bin's samples times the distance between their mean
    probability and their mean label. Probabilities are clamped to [1e-8, 1 - 1e-8].
    """
    probability = np.clip(probability, _EDGE, 1 - _EDGE)
    bin_of = (probability * bins).astype(np.int64)
    apart = np.bincount(bin_of, weights=probability - label, minlength=bins)
    return float(np.abs(apart).sum() / len(probability))


def ranking_area(probability: np.ndarray, label: np.ndarray) -> float:
    """Area under the ROC curve of [n] probabilities: 1 orders perfectly, 1/2 says nothing.

    From a histogram of 1000 bins of equal width; two samples of one bin are a tie and count half.
    NaN when all labels are equal.
    """
    bin_of = np.minimum((np.asarray(probability) * ORDER_BINS).astype(np.int64), ORDER_BINS - 1)
    label = np.asarray(label, bool)
    good = np.bincount(bin_of[label], minlength=ORDER_BINS).astype(np.float64)
    bad = np.bincount(bin_of[~label], minlength=ORDER_BINS).astype(np.float64)
    if not good.sum() or not bad.sum():
        return float("nan")
    below = np.cumsum(bad) - bad
    return float((good * (below + bad / 2)).sum() / (good.sum() * bad.sum()))


def brier_score(probability: np.ndarray, label: np.ndarray) -> float:
    """Mean squared distance between [n] probabilities and their labels."""
    return float(np.mean((np.asarray(probability, np.float64) - label) ** 2))


@dataclass(frozen=True)
class Calibration:
    """How good the survivals of one place of a draft are.

    Attributes:
        error: expected calibration error over 20 bins.
        area: under the ROC curve; NaN when all drafts had the same fate.
        brier: Brier score.
    """

    error: float
    area: float
    brier: float


def judge(confidence: np.ndarray, accepted: np.ndarray) -> list[Calibration]:
    """One judgement per place of the survivals, against which drafts survived.

    Args:
        confidence: [n, g], of each draft given those before it, calibrated or not.
        accepted: bool [n, g], the draft and all before it were accepted.

    Raises:
        ConfigError: as `fit_temperatures`.
    """
    _check(confidence, accepted)
    products = survival(np.asarray(confidence, np.float64))
    return [
        Calibration(calibration_error(p, y), ranking_area(p, y), brier_score(p, y))
        for p, y in zip(products.T, accepted.T, strict=True)
    ]


def _check(values: np.ndarray, accepted: np.ndarray) -> None:
    if values.ndim != 2 or values.shape != accepted.shape or not values.size:
        raise ConfigError(
            f"Confidences have shape {list(values.shape)} and labels {list(accepted.shape)}.",
            "Each draft of at least one sample has one of both.",
            "Collect them with every draft verified, as [samples, drafts].",
        )
    after = int((accepted[:, 1:] & ~accepted[:, :-1]).any(1).sum())
    if after:
        raise ConfigError(
            f"{after} of {len(accepted)} samples have an accepted draft after a rejected one.",
            "A label says whether a draft and all before it were accepted.",
            "Give the labels as running products.",
        )
