import numpy as np

from deepinfer_jax.engine.acceptance import Acceptance


def test_drafts_are_counted_by_their_place():
    found = Acceptance.empty(3)
    for offered, accepted in ((3, 3), (3, 1), (2, 2), (1, 0), (0, 0)):
        found.count(offered, accepted)
    assert found.steps == 4
    assert found.offered.tolist() == [4, 3, 2]
    assert found.reached.tolist() == [4, 3, 1]
    assert found.kept.tolist() == [3, 2, 1]
    assert found.length == 1 + 6 / 4
    np.testing.assert_allclose(found.conditional, [3 / 4, 2 / 3, 1])


def test_without_drafts_there_is_no_rate():
    found = Acceptance.empty(2)
    assert np.isnan(found.length) and np.isnan(found.conditional).all() and found.alarm() is None


def test_a_later_place_that_collapses_raises_the_alarm():
    found = Acceptance.empty(3)
    for _ in range(2000):
        found.count(3, 1)
    for _ in range(500):
        found.count(3, 3)
    assert found.alarm() == (
        "Draft 2 is kept in 20.0 % of the cases in which all before it are, and draft 1 in "
        "100.0 %: the drafter computes later places wrongly."
    )


def test_a_drafter_that_is_weak_everywhere_raises_none():
    found = Acceptance.empty(3)
    rng = np.random.default_rng(0)
    for _ in range(20000):
        found.count(3, int(np.cumprod(rng.random(3) < 0.3).sum()))
    assert (found.reached >= 1000).all() and found.alarm() is None
