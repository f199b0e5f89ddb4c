from dataclasses import replace

import numpy as np
import pytest

from deepinfer_jax.bench.varlen_steps import DRAFTS, LAG, World, centre, draw, run

SMALL = {"seed": 3, "rounds": 4, "steps": 8}


@pytest.fixture(scope="module")
def draws():
    return draw(12, **SMALL)


def world(t0, overhead=0.0):
    return World(centre(3.29, 1.0, 1.5), 1.0, 1.5, t0, overhead)


def test_three_of_four_accepted_make_the_published_length():
    assert centre(1 + sum(0.75**k for k in range(1, 6)), 0.0, 0.0) == pytest.approx(np.log(3))


def test_the_centre_gives_its_accept_length():
    rng = np.random.default_rng(0)
    shape = (200_000, DRAFTS)
    logits = centre(3.29, 1.0, 1.5) + rng.standard_normal((shape[0], 1))
    logits = logits + 1.5 * rng.standard_normal(shape)
    emitted = 1 + np.cumprod(1 / (1 + np.exp(-logits)), axis=1).sum(1)
    assert emitted.mean() == pytest.approx(3.29, abs=4 * emitted.std() / len(emitted) ** 0.5)


def test_draws_follow_their_seed_and_cover_all_requests():
    ours, again, other = (draw(8, seed=s, rounds=50, steps=3) for s in (1, 1, 2))
    np.testing.assert_array_equal(ours.draft, again.draft)
    assert (ours.luck != other.luck).all()
    request = np.sort(ours.request.ravel())
    # One in each of 400 strata: the number below a quantile is exact.
    assert (np.searchsorted(request, 0.0), len(request)) == (200, 400)


def test_where_rows_cost_nothing_every_draft_is_verified(draws):
    found = run(draws, world(1e9))
    assert found.verified == DRAFTS and found.gain == pytest.approx(0, abs=1e-6)
    assert found.accept_length == found.fixed_accept_length
    assert run(draws, world(1e9, 0.25)).gain == pytest.approx(1 / 1.25 - 1, abs=1e-6)


def test_dearer_rows_leave_fewer_drafts_and_gain_more(draws):
    cheap, dear = run(draws, world(200)), run(draws, world(20))
    assert dear.verified < cheap.verified < DRAFTS
    assert dear.gain > cheap.gain > 0
    assert dear.accept_length < cheap.accept_length < cheap.fixed_accept_length
    assert dear.fixed_accept_length == cheap.fixed_accept_length  # the same chances


@pytest.mark.parametrize(("lag", "knows"), [(0, True), (LAG, False)])
def test_with_lag_the_total_knows_nothing_of_the_drafts_it_is_for(draws, lag, knows):
    changed = draws.draft.copy()
    changed[:, -1] += 4.0  # only the last step's drafts are all but certain
    before = run(draws, world(20), lag=lag)
    after = run(replace(draws, draft=changed), world(20), lag=lag)
    assert (after.verified != before.verified) is knows
    assert after.accept_length > before.accept_length


def test_the_scheduler_sees_logits_that_are_sharpened_and_then_calibrated(draws):
    ours = run(draws, world(50))
    sharp = run(draws, world(50), sharpness=1.5)
    healed = run(draws, world(50), sharpness=1.5, temperatures=np.full(DRAFTS, 1.5))
    assert sharp.verified != ours.verified
    assert (healed.verified, healed.gain) == (ours.verified, ours.gain)
