import numpy as np
import pytest

from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.notices import Notices


def collapsed(counts, steps):
    for _ in range(steps):
        counts.count(3, 1)


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
    collapsed(found, 2000)
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


def test_counts_and_rates_are_by_place_and_a_rate_of_nothing_is_none():
    found = Acceptance.empty(3)
    for offered, accepted in ((3, 3), (2, 0), (1, 1), (1, 1), (0, 0)):
        found.count(offered, accepted)
    assert found.counts() == {
        "verify_steps": 4,
        "offered_by_place": [4, 2, 1],
        "reached_by_place": [4, 1, 1],
        "kept_by_place": [3, 1, 1],
    }
    assert found.rates() == {
        "offered_per_step": 7 / 4,
        "tokens_per_step": 1 + 5 / 4,
        "kept_of_offered": [0.75, 0.5, 1.0],
        "kept_of_reached": [0.75, 1.0, 1.0],
    }
    nothing = {"kept_of_offered": [None] * 3, "kept_of_reached": [None] * 3}
    nothing |= {"offered_per_step": None, "tokens_per_step": None}
    assert found.since(found.copy()).rates() == nothing


def test_what_came_after_a_copy_is_told_apart():
    found = Acceptance.empty(2)
    found.count(2, 2)
    before = found.copy()
    found.count(2, 1)
    assert before.counts()["kept_by_place"] == [1, 1]
    later = found.since(before)
    assert (later.steps, later.counts()["kept_by_place"]) == (1, [1, 0])
    assert later.length == 2


def test_the_alarm_is_told_once_to_who_listens():
    found, told = Acceptance.empty(3), []
    found.on_alarm = told.append
    collapsed(found, 900)
    assert told == []
    collapsed(found, 2000)
    assert told == [found.alarm()]


def test_a_sound_drafter_is_never_told_of():
    found = Acceptance.empty(3)
    found.on_alarm = pytest.fail
    for step in range(3000):
        found.count(3, step % 4)


def test_an_alarm_is_a_warning_or_a_report():
    with pytest.warns(RuntimeWarning, match=r"^Draft 2 is kept in 0\.0 %"):
        found = Acceptance.empty(3)
        found.on_alarm = Notices(None).alarm
        collapsed(found, 1500)
    calls = []
    found = Acceptance.empty(3)
    found.on_alarm = Notices(lambda *call: calls.append(call)).alarm
    collapsed(found, 1500)
    assert calls == [(f"alarm: {found.alarm()}", 0, 0)]
