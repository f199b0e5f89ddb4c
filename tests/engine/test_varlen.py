import numpy as np
import pytest
from engine_loop import limits

from deepinfer_jax.engine.buckets import Draws, pack, plan_buckets
from deepinfer_jax.engine.costs import full_step, step_times
from deepinfer_jax.engine.plan import Running, View
from deepinfer_jax.engine.planner import plan
from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.engine.varlen import Lengths, decode_sizes
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner.layout import Part
from deepinfer_jax.sampling.lengths import CostTable

SIZES = limits(slots=4, rows=32, drafts=3, page=64, pages=40)
BUCKETS = plan_buckets(SIZES, varlen=True)


def decoding(*slots, drafts=3, limit=60):
    """Running sequences that decode in these slots, numbered from 10."""
    running = Running.empty(SIZES.slots)
    for slot in slots:
        running.request[slot], running.prompt[slot] = 10 + slot, 8
        running.computed[slot] = running.certain[slot] = 9
        running.limit[slot], running.drafts[slot], running.allocated[slot] = limit, drafts, 1
    return running


def view(running, budget=None):
    return View(step=5, retired=3, now=0.0, running=running, waiting=(), allocatable=30, pending=0,
                frees=lambda slot: 0, budget=budget)  # fmt: skip


def test_every_number_of_sequences_has_programs_of_several_sizes():
    assert [(b.rows, b.parts, b.drafts) for b in decode_sizes(BUCKETS, 1)] == [
        *((1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 4, 3), (12, 4, 3), (16, 4, 3)),
    ]
    assert [(b.rows, b.parts) for b in decode_sizes(BUCKETS, 3)] == [
        *((4, 4), (8, 4), (12, 4), (16, 4)),
    ]


def test_a_plan_brings_all_drafts_unless_a_budget_says_otherwise():
    made = plan(view(decoding(0, 2)), SIZES, BUCKETS)
    assert made.count.tolist() == [4, 4] and made.budget is None
    assert (made.bucket.rows, made.bucket.parts) == (8, 4)
    assert made.running.computed[[0, 2]].tolist() == [13, 13]
    assert made.running.certain[[0, 2]].tolist() == [10, 10]

    made = plan(view(decoding(0, 2), lambda slots, drafts: 2), SIZES, BUCKETS)
    assert made.count.tolist() == [4, 4] and made.budget == 2
    assert (made.bucket.rows, made.bucket.drafts) == (8, 3)
    made = plan(view(decoding(0, 2), lambda slots, drafts: 0), SIZES, BUCKETS)
    assert (made.bucket.rows, made.bucket.drafts, made.budget) == (4, 0, 0)
    ints, _ = pack(made, Draws.greedy(SIZES.slots), {})
    assert made.bucket.split(ints)[1][:2, Part.COUNT].tolist() == [1, 1]


def test_near_its_end_a_sequence_brings_fewer_drafts():
    assert plan(view(decoding(1, limit=12)), SIZES, BUCKETS).count.tolist() == [2]
    assert plan(view(decoding(1, limit=11)), SIZES, BUCKETS).count.tolist() == [1]
    running = decoding(1, limit=100)
    running.computed[1] = running.certain[1] = 62  # of a page of 64
    assert plan(view(running), SIZES, BUCKETS).count.tolist() == [2]


def test_a_step_too_small_for_all_drafts_is_refused():
    with pytest.raises(ConfigError, match="Verifying all of them takes 20 rows") as caught:
        limits(slots=4, rows=20, updates=30, drafts=4)
    assert "A step has 20 rows for 4 sequences with 4 drafts each." in str(caught.value)


def linear(start, more):
    """Times by parts: `start` ms and `more` a row."""
    found = {}
    for n in (1, 4):
        sizes = [b.rows for b in decode_sizes(BUCKETS, n)]
        found[n] = StepTimes(CostTable.of([(s, start + more * s) for s in sizes]))
    return found


def test_a_budget_follows_confidences_that_are_two_steps_old():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 3.0))
    slots, numbers, drafts = np.arange(2), np.array([10, 11]), np.array([3, 3])
    unknown = lengths.budget(9, slots, numbers, drafts)
    for slot, number in zip(slots, numbers, strict=True):
        lengths.note(7, int(slot), int(number), np.full(3, 0.01, np.float32))
        lengths.note(8, int(slot), int(number), np.full(3, 0.99, np.float32))
    # Drafts nobody has judged yet count as sure.
    assert unknown == 6
    # Two drafts are free: no program for two sequences has fewer than four rows.
    assert lengths.budget(9, slots, numbers, drafts) == 2
    assert lengths.budget(10, slots, numbers, drafts) == 6
    # What is known of a slot's last owner says nothing of its next.
    assert lengths.budget(9, slots, np.array([20, 21]), drafts) == 6


def test_steps_that_cost_nothing_more_verify_everything():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1e-6))
    for slot in (0, 1):
        lengths.note(1, slot, 10 + slot, np.full(3, 0.05, np.float32))
    assert lengths.budget(9, np.arange(2), np.array([10, 11]), np.array([3, 3])) == 6


def test_times_are_measured_on_full_steps_of_every_size(tmp_path):
    ran = []

    def run(bucket, ints, floats):
        counts = bucket.split(ints)[1][:, Part.COUNT]
        ran.append((bucket.rows, int(counts.sum()), len(counts), int(counts.max())))

    found = step_times(BUCKETS, run, folder=tmp_path, identity={"model": "m"}, ttl_s=60)
    assert sorted(found) == [1, 4]
    assert {rows for rows, *_ in ran} == {b.rows for b in decode_sizes(BUCKETS, 1)}
    assert all(rows == total for rows, total, *_ in ran)
    assert all(most <= 1 + SIZES.drafts for *_, most in ran)
    ran.clear()
    again = step_times(BUCKETS, run, folder=tmp_path, identity={"model": "m"}, ttl_s=60)
    assert not ran and again[4].table.ms.tolist() == found[4].table.ms.tolist()


def test_a_full_step_has_no_row_that_is_padding():
    for bucket in decode_sizes(BUCKETS, 1):
        parts = bucket.split(full_step(bucket)[0])[1]
        assert (parts[:, Part.COUNT] > 0).all()
        assert parts[:, Part.COUNT].max() <= bucket.width
