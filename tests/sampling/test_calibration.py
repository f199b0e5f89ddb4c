import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.calibration import (
    TEMPERATURES,
    brier_score,
    calibration_error,
    fit_temperatures,
    judge,
    ranking_area,
    uncalibrated,
)
from deepinfer_jax.sampling.lengths import calibrated


@pytest.fixture(scope="module")
def overconfident():
    """Logits twice as large as the truth, and which drafts were accepted."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1.2, 1.5, (200_000, 3))
    truth = 1 / (1 + np.exp(-logits / 2))
    return logits, np.cumprod(rng.random(logits.shape) < truth, axis=1).astype(bool)


def test_temperatures_that_made_the_logits_are_found(overconfident):
    logits, accepted = overconfident
    before = judge(calibrated(logits, np.ones(3)), accepted)
    np.testing.assert_allclose([c.error for c in before], [0.105, 0.122, 0.111], atol=0.003)
    found = fit_temperatures(logits, accepted)
    np.testing.assert_allclose(found, 1.9953, atol=1e-4)
    after = judge(calibrated(logits, found), accepted)
    assert all(c.error < 0.005 for c in after)
    # A temperature keeps the order of one place, so at the first one only the values change.
    assert after[0].area == pytest.approx(before[0].area, abs=1e-3)
    assert all(a.brier < b.brier for a, b in zip(after, before, strict=True))


def test_the_logits_behind_confidences_are_found_again():
    logits = np.array([[-40.0, -3.0, 0.0, 12.0, 50.0]], np.float32)
    temperature = np.full(5, 10.0, np.float32)
    found = uncalibrated(calibrated(logits, temperature), temperature)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
    ends = uncalibrated(np.array([0.0, 1.0]), np.ones(2))
    assert np.isfinite(ends).all()
    assert ends[0] < -60 and 16 < ends[1] < 18


def test_the_first_of_equally_good_temperatures_is_taken():
    logits, accepted = np.zeros((10, 2)), np.zeros((10, 2), bool)
    accepted[:5, 0] = True
    # A logit of 0 is a confidence of 1/2 at any temperature.
    assert fit_temperatures(logits, accepted).tolist() == [TEMPERATURES[0]] * 2
    assert TEMPERATURES[0] == pytest.approx(0.1) and len(TEMPERATURES) == 41


def test_calibration_error_by_hand():
    probability = np.array([0.0, 0.1, 0.6, 0.7, 1.0])
    label = np.array([0, 1, 1, 0, 1])
    # Halves: 2 of 5 with means 0.05 and 0.5, 3 of 5 with means 2.3 / 3 and 2 / 3.
    assert calibration_error(probability, label, 2) == pytest.approx((0.9 + 0.3) / 5)


def test_area_under_the_curve_by_hand():
    # Of four pairs, two are right, one is a tie and one is wrong.
    assert ranking_area(np.array([0.9, 0.3, 0.3, 0.5]), np.array([1, 1, 0, 0])) == 2.5 / 4
    assert ranking_area(np.array([0.2, 0.7]), np.array([0, 1])) == 1
    assert np.isnan(ranking_area(np.array([0.2, 1.0]), np.array([1, 1])))


def test_brier_score_by_hand():
    assert brier_score(np.array([1.0, 0.5]), np.array([True, False])) == 0.125


@pytest.mark.parametrize(
    ("shape", "accepted", "what"),
    [
        ((0, 2), np.zeros((0, 2), bool), "shape [0, 2]"),
        ((3, 2), np.zeros((3, 1), bool), "labels [3, 1]"),
        ((2, 2), np.array([[0, 1], [1, 1]], bool), "1 of 2 samples have an accepted draft after"),
    ],
)
def test_data_that_cannot_be_labels_are_refused(shape, accepted, what):
    with pytest.raises(ConfigError) as caught:
        fit_temperatures(np.zeros(shape), accepted)
    assert what in str(caught.value)
