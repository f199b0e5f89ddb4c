import numpy as np
import pytest

from deepinfer_jax.skills.mixture import SHARES, draw, shares


@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_shares_with_a_changed_part_sum_to_one_and_keep_the_others_in_proportion(level):
    changed = shares(level, SHARES | {"sum_direct": 2 * SHARES["sum_direct"]})
    plain = shares(level)
    assert sum(changed.values()) == pytest.approx(1)
    assert changed["copy"] == plain["copy"]
    assert changed["sum_direct"] / changed["sort"] == pytest.approx(
        2 * plain["sum_direct"] / plain["sort"]
    )
    assert changed["lookup"] / changed["sort"] == pytest.approx(plain["lookup"] / plain["sort"])


def test_copying_falls_with_the_level():
    assert [shares(level)["copy"] for level in (0, 1)] == pytest.approx([0.25, 0.06])


def test_samples_are_drawn_in_the_given_shares():
    only_lists = {s: float(s in ("sort", "reverse")) for s in SHARES}
    skills = {s.skill for s in draw(np.random.default_rng(0), 1.0, 60, parts=only_lists)}
    assert skills == {"copy", "sort", "reverse"}
