import numpy as np
import pytest

from deepinfer_jax.engine.step_times import WINDOW, StepTimes
from deepinfer_jax.sampling.lengths import CostTable


@pytest.fixture
def times():
    return StepTimes(CostTable(np.array([4, 8]), np.array([10.0, 20.0])))


def test_a_size_counts_after_ten_steps(times):
    for _ in range(9):
        times.observe(1, 4, 18.0, 0.0)
    assert times.slope_ms == 0
    times.observe(1, 4, 18.0, 0.0)
    assert times.slope_ms == 2.0


def test_the_slope_is_the_median_of_the_medians_of_sizes(times):
    for extra in range(11):
        times.observe(1, 4, 10.0 + 4 * extra, 0.0)
    for extra in (1, 2):
        for _ in range(5):
            times.observe(1, 8, 20.0 + 8 * extra, 0.0)
    assert times.slope_ms == (5 + 1.5) / 2
    assert times.milliseconds(1).tolist() == [10 + 4 * 3.25, 20 + 8 * 3.25]


def test_steps_faster_than_the_table_do_not_lower_it(times):
    for _ in range(20):
        times.observe(1, 8, 12.0, 0.0)
    assert times.slope_ms == 0


def test_old_steps_leave_the_window(times):
    for _ in range(20):
        times.observe(1, 4, 14.0, 0.0)
    for step in range(WINDOW):
        times.observe(1, 8, 20.0, 0.0)
        if step == WINDOW - 11:  # ten of them are left
            assert times.slope_ms == 0.5
    assert times.slope_ms == 0


def test_sampling_is_the_median_of_the_last_nine(times):
    for spent in (1.0, 1.0, 1.0, 9.0):
        times.observe(2, 4, 10.0, spent)
    assert times.sampler_ms(2) == 0
    for spent in range(9):
        times.observe(3, 4, 10.0, float(spent))
    assert times.sampler_ms(3) == 4
    times.observe(2, 4, 10.0, 9.0)
    assert times.sampler_ms(2) == 1  # five of its own: 1 1 1 9 9
    assert times.sampler_ms(7) == 5  # of the last nine of all: 1 2 3 4 5 6 7 8 9
    assert times.milliseconds(2).tolist() == [11.0, 21.0]
