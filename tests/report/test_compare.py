import numpy as np
import pytest

from deepinfer_jax.report.compare import Row, compare, data_order

NAN, INF = float("nan"), float("inf")


def one(x, y, **options):
    return compare({"logits": np.asarray(x)}, {"logits": np.asarray(y)}, **options)


def test_arrays_stand_in_the_order_in_which_a_forward_computes_them():
    ordered = (
        "token_ids embed engram_hash engram_rows engram_gate L0.attn_pre L0.stream L0.pre_next "
        "L2.latent L2.topk L2.attn_o L2.novel L10.attn_in main_hidden final_hidden logits aside"
    ).split()
    assert sorted(reversed(ordered), key=data_order) == ordered


def test_the_first_row_is_the_array_nearest_the_cause():
    zeros = {name: np.zeros(2) for name in ("logits", "L10.stream", "L9.ffn_out", "embed")}
    ones = zeros | {name: np.ones(2) for name in ("logits", "L10.stream", "L9.ffn_out")}
    rows = compare(zeros, ones)
    assert [row.name for row in rows] == ["L9.ffn_out", "L10.stream", "logits"]


def test_only_arrays_of_both_traces_are_compared():
    assert compare({"embed": np.zeros(1)}, {"logits": np.ones(1)}) == []


def test_a_row_counts_what_lies_beyond_the_tolerance_and_points_at_the_largest():
    x = np.zeros((2, 3), np.float32)
    y = np.array([[0, 0.25, 0], [0, -0.5, 0.125]], np.float32)
    assert one(x, y, tolerance=0.125) == [Row("logits", (2, 3), 2, 0.5, (1, 1))]
    assert one(x, y, tolerance=0.5) == []
    assert one(x, y)[0].differing == 3


@pytest.mark.parametrize("tolerance", [0.0, 1.0])
def test_equal_infinities_and_two_nans_are_equal(tolerance):
    same = [1.0, INF, -INF, NAN]
    assert one(same, same, tolerance=tolerance) == []


@pytest.mark.parametrize(
    ("x", "y"),
    [([0, NAN], [0, 1.0]), ([0, 1.0], [0, NAN]), ([0, INF], [0, -INF]), ([0, INF], [0, NAN]),
     ([0, 3.0], [0, INF])],
)  # fmt: skip
def test_a_nan_or_an_infinity_against_anything_else_differs_by_any_measure(x, y):
    assert one(x, y, tolerance=1e30) == [Row("logits", (2,), 1, INF, (1,))]


def test_another_shape_differs_everywhere():
    assert one(np.zeros((2, 3)), np.zeros((3, 2))) == [Row("logits", (2, 3), 6, INF, ())]
    assert one(np.zeros((0, 3)), np.zeros((0, 3))) == []


def test_texts_are_equal_or_differ_by_any_measure():
    fresh = ["fresh", "verify"]
    assert one(fresh, fresh) == []
    assert one(fresh, ["fresh", "fresh"], tolerance=9) == [Row("logits", (2,), 1, INF, (1,))]
    assert one(["1", "2"], [1.0, 2.0]) == [Row("logits", (2,), 2, INF, (0,))]


def test_large_integers_that_round_to_one_float_differ():
    seeds = np.array([2**63, 7], np.uint64)
    assert one(seeds, seeds + np.array([1, 0], np.uint64)) == [Row("logits", (2,), 1, 1.0, (0,))]


def test_integers_and_booleans_are_compared_as_numbers():
    assert one([True, False], [True, True])[0].differing == 1
    assert one(np.array([-1, 7], np.int32), np.array([-1, 9], np.int64))[0].max_abs == 2
