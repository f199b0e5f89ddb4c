import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.lengths import (
    CostTable,
    budget,
    calibrated,
    carried,
    filled,
    split,
    survival,
)

F = np.float32
EXAMPLE = np.array([[0.95, 0.90, 0.80], [0.60, 0.50, 0.40], [0.85, 0.70, 0.90]], F)
STALE = np.array([[0.5, 0.9, 0.9], [0.9, 0.9, 0.2], [1, 1, 0.3]], F)
device_split = jax.jit(split)


def every(values):
    return np.full(values.shape[0], values.shape[1], np.int32)


def on_device(values, drafts, rows):
    got = device_split(jnp.asarray(values), jnp.asarray(drafts), jnp.int32(rows))
    assert got.dtype == jnp.int32
    return np.asarray(got)


def expected_tokens(values, rows):
    """What a step of these rows emits: each sequence its own token and its surviving drafts."""
    return sum(1 + values[i, : n - 1].astype(np.float64).sum() for i, n in enumerate(rows))


def exhaustive(values, time_of):
    """The largest tokens per time of all allocations."""
    g = values.shape[1]
    return max(
        expected_tokens(values, rows) / time_of(sum(rows))
        for rows in itertools.product(range(1, g + 2), repeat=values.shape[0])
    )


def causal_greedy(values, time_of):
    """The paper's algorithm with early stop: admit drafts while each one raises the quotient."""
    n, g = values.shape
    order = sorted((-float(values[r, j]), j, r) for r in range(n) for j in range(g))
    rows, tokens = [1] * n, float(n)
    for value, _, r in order:
        if (tokens - value) / time_of(sum(rows) + 1) <= tokens / time_of(sum(rows)):
            break
        tokens, rows[r] = tokens - value, rows[r] + 1
    return rows


def random_case(rng):
    n, g = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    values = survival(rng.random((n, g)).astype(F))
    ms = np.cumsum(rng.random(n * (g + 1)) ** 3) + 0.3
    return values, np.arange(1, n * (g + 1) + 1), ms


def recorded(golden, kind):
    return json.loads((golden / "varlen.json").read_text())[kind]


def test_the_host_plans_as_the_original(golden):
    cases = recorded(golden, "host_plan")
    assert len(cases) == 24
    for case in cases:
        times = StepTimes(CostTable.of(case["curve"]))
        for seen in case["observations"]:
            times.observe(seen["n_seqs"], seen["bucket"], seen["forward_ms"], seen["sampler_ms"])
        requests, g = case["requests"], case["n_drafts"]
        assert times.slope_ms == pytest.approx(case["slope_ms"], rel=1e-9, abs=1e-12)
        assert times.sampler_ms(len(requests)) == pytest.approx(case["sampler_ms"], rel=1e-9)

        def values(name, requests=requests, g=g):
            known = np.array([r[name] is not None for r in requests])
            rows = np.array([r[name] or [0.0] * g for r in requests], F)
            return filled(rows, known, np.array([r["has_draft"] for r in requests]))

        older, newest = values("survival_for_sizing"), values("survival_for_split")
        ms = times.milliseconds(len(requests))
        total = budget(older, every(older), times.table.sizes, ms)
        assert total == case["total_rows"]
        assert split(newest, every(newest), total).tolist() == case["rows"]


def test_the_device_splits_as_the_original(golden):
    cases = recorded(golden, "device_split")
    assert len(cases) == 10
    for case in cases:
        previous = survival(jnp.asarray(case["prev_confidence"], jnp.float32))
        values = carried(previous, jnp.asarray(case["remap"], jnp.int32))
        assert on_device(values, every(values), case["total_rows"]).tolist() == case["rows"]


@pytest.mark.parametrize(
    ("sizes", "ms", "rows", "stops_at"),
    [
        (range(3, 13), [10 + 0.8 * b for b in range(3, 13)], [4, 2, 4], [4, 2, 4]),
        ([4, 6, 8, 12], [12.8, 15, 16, 22], [4, 2, 2], [4, 2, 2]),
        ([3, 8, 12], [10, 14, 20], [4, 2, 2], [1, 1, 1]),
    ],
    ids=["linear", "buckets", "cliff"],
)
def test_worked_examples(sizes, ms, rows, stops_at):
    sizes, ms = np.array(sizes), np.array(ms, np.float64)
    values = survival(EXAMPLE)

    def time_of(b):
        return ms[np.searchsorted(sizes, b)]

    total = budget(values, every(values), sizes, ms)
    assert split(values, every(values), total).tolist() == rows
    assert expected_tokens(values, rows) / time_of(total) == pytest.approx(
        exhaustive(values, time_of)
    )
    # The paper's early stop loses at the cliff, which is why all totals are searched.
    assert causal_greedy(values, time_of) == stops_at


@pytest.mark.parametrize(
    ("ms", "thousandfold"),
    [
        (
            [10 + 0.8 * b for b in range(3, 13)],
            [241.94, 299.24, 343.21, 382.09, 406.35, 423.11, 438.02, 448.31, 445.19, 433.14],
        ),
        (
            [12.8] * 2 + [15.0] * 2 + [16.0] * 2 + [22.0] * 4,
            [234.38, 308.59, 320.33, 377.00, 396.19, 433.69, 342.45, 366.80, 380.43, 385.89],
        ),
        (
            [10.0] + [14.0] * 5 + [20.0] * 4,
            [300.00, 282.14, 343.21, 403.93, 452.79, 495.64, 376.70, 403.48, 418.48, 424.48],
        ),
    ],
    ids=["linear", "buckets", "cliff"],
)
def test_tokens_per_second_along_the_worked_path(ms, thousandfold):
    values, found = survival(EXAMPLE), []
    for total, time in zip(range(3, 13), ms, strict=True):
        rows = split(values, every(values), total)
        found.append(1000 * expected_tokens(values, rows) / time)
    np.testing.assert_allclose(found, thousandfold, atol=0.006)


@pytest.mark.parametrize(
    ("drafts", "rows"),
    [(0, [1, 1, 1]), (3, [1, 2, 3]), (4, [1, 3, 3]), (5, [2, 3, 3]), (6, [3, 3, 3]), (9, [4] * 3)],
)
def test_an_old_total_goes_to_the_likeliest_of_the_new_drafts(drafts, rows):
    values = survival(STALE)
    assert on_device(values, every(values), 3 + drafts).tolist() == rows


def test_no_allocation_is_better_than_the_chosen_one():
    rng = np.random.default_rng(0)
    for _ in range(300):
        values, sizes, ms = random_case(rng)
        total = budget(values, every(values), sizes, ms)
        rows = split(values, every(values), total)
        assert rows.sum() == total
        best = exhaustive(values, lambda b, ms=ms: ms[b - 1])
        assert expected_tokens(values, rows) / ms[total - 1] == pytest.approx(best, rel=1e-6)


def test_the_first_of_equal_totals_is_taken():
    values = np.array([[0.5]], F)
    sizes = np.array([1, 2])
    assert budget(values, every(values), sizes, np.array([2.0, 3.0])) == 1
    assert budget(values, every(values), sizes, np.array([2.0, 2.999])) == 2


def test_a_total_beyond_the_largest_size_never_counts():
    values = survival(np.ones((3, 5), F))
    sizes = np.array([1, 2, 4, 8])
    assert budget(values, every(values), sizes, np.ones(4)) == 8
    with pytest.raises(ConfigError) as caught:
        budget(values, every(values), sizes[:2], np.ones(2))
    assert "3 sequences need a step of 3 rows; the largest in the cost table has 2." in str(
        caught.value
    )


def test_an_unknown_survival_is_1_with_drafts_and_0_without():
    values = np.full((3, 2), 0.25, F)
    got = filled(values, np.array([True, False, False]), np.array([True, True, False]))
    assert got.tolist() == [[0.25, 0.25], [1, 1], [0, 0]] and got.dtype == F


def test_only_drafts_that_can_be_verified_enter_the_budget():
    values = survival(np.full((2, 3), 0.9, F))
    sizes = np.arange(1, 9)
    assert budget(values, np.array([3, 0], np.int32), sizes, np.ones(8)) == 5
    assert budget(values, np.array([2, 1], np.int32), sizes, np.ones(8)) == 5


def test_both_halves_of_the_scheduler_split_alike():
    rng = np.random.default_rng(1)
    for _ in range(100):
        # Few distinct confidences, so that ties are common; some places have no sequence.
        confidence = rng.choice(np.array([0, 0.25, 0.5, 1], F), (5, 3))
        drafts = rng.integers(-1, 4, 5).astype(np.int32)
        live, valid = int((drafts >= 0).sum()), int(np.maximum(drafts, 0).sum())
        values = survival(confidence)
        np.testing.assert_array_equal(values, survival(jnp.asarray(confidence)))
        before = np.where(drafts >= 0, 1, 0)
        for total in range(live, live + valid + 3):
            rows = split(values, drafts, np.int32(total))
            np.testing.assert_array_equal(rows, on_device(values, drafts, total))
            assert rows.sum() == live + min(total - live, valid)
            assert (rows <= drafts + 1).all() and (rows[drafts < 0] == 0).all()
            assert (rows >= before).all()  # one more row takes none away from anybody
            before = rows


def test_ties_go_to_the_earlier_sequence():
    values = survival(np.array([[0.5, 1.0], [1.0, 0.5], [0.5, 1.0]], F))
    drafts = every(values)
    assert on_device(values, drafts, 4).tolist() == [1, 2, 1]
    assert on_device(values, drafts, 5).tolist() == [2, 2, 1]
    assert on_device(values, drafts, 6).tolist() == [3, 2, 1]
    assert on_device(values, drafts, 7).tolist() == [3, 3, 1]


def test_without_ties_the_order_of_sequences_does_not_matter():
    rng = np.random.default_rng(2)
    values = survival(rng.uniform(0.1, 0.99, (5, 3)).astype(F))
    drafts, order = np.array([3, 1, 2, -1, 3], np.int32), rng.permutation(5)
    for total in range(4, 14):
        np.testing.assert_array_equal(
            on_device(values[order], drafts[order], total), on_device(values, drafts, total)[order]
        )


def test_places_without_a_sequence_change_nothing():
    values = survival(np.array([[0.9, 0.2, 0.1], [0.8, 0.7, 0.6]], F))
    # Padding may hold anything, such as the survivals of a sequence that has ended.
    padded = np.concatenate([values[:1], np.ones((2, 3), F), values[1:], np.ones((1, 3), F)])
    drafts = np.array([3, -1, -1, 3, -1], np.int32)
    for total in range(2, 9):
        rows = on_device(values, every(values), total)
        assert on_device(padded, drafts, total).tolist() == [rows[0], 0, 0, rows[1], 0]


def test_a_sequence_that_was_not_in_the_step_before_gets_what_is_left():
    previous = jnp.asarray([[0.9, 0.1], [0.5, 0.4]], jnp.float32)
    values = carried(previous, jnp.asarray([-1, 1, 0], jnp.int32))
    assert values.tolist() == [[0, 0], previous[1].tolist(), previous[0].tolist()]
    assert on_device(values, every(values), 7).tolist() == [1, 3, 3]
    assert on_device(values, every(values), 8).tolist() == [2, 3, 3]


def test_a_confidence_that_is_no_number_comes_last():
    confidence = np.array([[0.5, np.nan, 0.9], [0.1, 0.1, 0.1]], F)
    assert survival(confidence)[0].tolist() == [0.5, 0, 0]
    assert on_device(survival(confidence), every(confidence), 6).tolist() == [2, 4]


def test_confidence_is_a_clamped_sigmoid_of_the_divided_logit():
    logit = np.array([[0.0, 2.0, -900.0], [3.0, -2.0, 900.0]], F)
    got = calibrated(logit, np.array([1, 2, 1], F))
    known = [[0.5, 1 / (1 + np.exp(-1)), np.exp(-60)], [1 / (1 + np.exp(-3)), 1 / (1 + np.e), 1]]
    np.testing.assert_allclose(got, known, rtol=1e-6)
    device = jax.jit(calibrated)(jnp.asarray(logit), jnp.asarray([1, 2, 1], jnp.float32))
    assert device.dtype == jnp.float32
    np.testing.assert_allclose(device, known, rtol=1e-6)


def test_a_size_answers_for_all_rows_that_run_in_it():
    table = CostTable(np.array([1, 4, 8]), np.array([2.0, 3.0, 7.0]))
    assert [table.place(b) for b in (1, 2, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert table.milliseconds(0.5, 10.0).tolist() == [12.5, 15.0, 21.0]


@pytest.mark.parametrize(
    ("sizes", "ms"),
    [([], []), ([2, 1], [1, 1]), ([0, 1], [1, 1]), ([1, 2], [1]), ([1], [0]), ([1], [np.nan])],
)
def test_a_cost_table_that_makes_no_sense_is_refused(sizes, ms):
    with pytest.raises(ConfigError) as caught:
        CostTable(np.array(sizes), np.array(ms))
    assert "has sizes" in caught.value.what and caught.value.do == "Measure the table again."
