"""Statistics of drafts, against numbers counted by hand."""

import math

import numpy as np
import pytest

from deepinfer_jax.evaluation.drafts import (
    draft_statistics,
    halves,
    report,
    scaled_error,
    scaling,
)
from deepinfer_jax.sampling.verified import VerifiedBlock


def logit(*confidence):
    return tuple(math.log(c / (1 - c)) for c in confidence)


def block(offered, accepted, *confidence, ended=False):
    return VerifiedBlock(offered, accepted, logit(*confidence) if confidence else None, ended)


ANSWERS = [
    [block(3, 3, 0.9, 0.9, 0.6), block(3, 1, 0.9, 0.6, 0.9)],
    [
        block(3, 0, 0.6, 0.9, 0.9),
        block(1, 1, 0.9, 0.2, 0.2),
        block(3, 2, 0.9, 0.9, 0.3, ended=True),
    ],
]


def test_blocks_are_counted_up_to_the_first_draft_that_was_not_kept():
    found = draft_statistics(ANSWERS, 3)
    assert (found.prompts, found.steps, found.drafts) == (2, 5, 13)
    assert found.length == 1 + 7 / 5
    # Of five first drafts four are kept, of three second ones two. The last block ended after two,
    # and the fourth offered one, so of third drafts only the first block's is told.
    assert found.acceptance == pytest.approx((4 / 5, 2 / 2 * 2 / 3, 1))


def test_confidences_are_judged_on_the_drafts_that_were_reached():
    found = draft_statistics(ANSWERS, 3)
    # Confidence 0.9: kept in all 6 cases; 0.6: kept in 1 of 3. Two bins of twenty.
    expected = (6 * (1 - 0.9) + 3 * (0.6 - 1 / 3)) / 9
    assert found.calibration_error == pytest.approx(expected, abs=1e-12)
    # 7 kept against 2 not: six of the kept rank above both, one ties with both.
    assert found.ranking_area == pytest.approx((6 * 2 + 2 * 0.5) / 14)


def test_what_nothing_was_counted_for_is_no_number():
    empty = draft_statistics([[], []], 2)
    assert (empty.prompts, empty.steps, empty.drafts) == (2, 0, 0)
    assert all(map(math.isnan, (empty.length, *empty.acceptance, empty.calibration_error)))
    silent = draft_statistics([[block(2, 1), block(2, 2)]], 2)
    assert silent.length == 2.5
    assert silent.acceptance == (1, 0.5)
    assert math.isnan(silent.calibration_error) and math.isnan(silent.ranking_area)
    always = draft_statistics([[block(2, 2, 0.9, 0.9)]], 2)
    assert always.calibration_error == pytest.approx(0.1)
    assert math.isnan(always.ranking_area)
    assert math.isnan(scaled_error([[]], [1.0, 1.0]))


def test_temperatures_are_fitted_on_blocks_with_a_label_for_every_draft():
    rng = np.random.default_rng(0)
    g = rng.normal(1.2, 1.5, (4000, 2))
    kept = np.cumprod(rng.random(g.shape) < 1 / (1 + np.exp(-g / 2)), axis=1).sum(axis=1)
    whole = [VerifiedBlock(2, int(k), tuple(row)) for row, k in zip(g.tolist(), kept, strict=True)]
    found = scaling([whole], 2)
    # The true confidence is that at temperature 2; a grid point lies at 1.9953.
    assert found is not None
    assert all(1.5 < t < 2.6 for t in found)
    assert scaled_error([whole], found) < scaled_error([whole], [1.0, 1.0]) / 2
    partial = [
        VerifiedBlock(1, 0, (9.0, 9.0)),
        VerifiedBlock(2, 1, (9.0, 9.0), ended=True),
        VerifiedBlock(2, 0),
    ]
    assert scaling([whole + partial], 2) == found
    assert scaling([partial], 2) is None
    # A block whose drafts were all kept is told of, though what came after them ended the answer.
    assert scaling([[VerifiedBlock(2, 2, (1.0, 1.0), ended=True)]], 2) is not None


def test_prompts_are_halved_by_a_lot_that_its_seed_decides():
    assert halves(7, 3).sum() == 4
    np.testing.assert_array_equal(halves(7, 3), halves(7, 3))
    assert any((halves(7, 3) != halves(7, seed)).any() for seed in range(3))


def test_scaling_is_fitted_on_one_half_and_judged_on_the_other():
    """Prompts with 0.6 for what is always kept, and one half of them with 0.9."""
    low, high = [block(1, 1, 0.6)], [block(1, 1, 0.9)]
    judged = halves(4, 0)
    answers = [high if j else low for j in judged]
    made = report({"a": answers[:1], "b": answers[1:]}, 1, 0)
    # The coldest temperature makes 0.6 almost certain.
    assert made.temperatures == (pytest.approx(0.1),)
    assert [line.skill for line in made.judgements] == ["a", "b", "all"]
    whole = made.judgements[-1]
    assert whole.before == pytest.approx(0.1)
    assert whole.after < 1e-6
    assert whole.statistics.calibration_error == pytest.approx((0.1 + 0.4) / 2)
    first = made.judgements[0]
    assert math.isnan(first.before) != bool(judged[0])
    assert first.statistics.steps == 1
    assert report({"a": [[block(1, 1)]]}, 1, 0).temperatures is None
