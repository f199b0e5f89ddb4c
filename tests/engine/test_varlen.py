from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_loop import limits

from deepinfer_jax.engine import costs, varlen
from deepinfer_jax.engine.buckets import Draws, fit, pack, plan_buckets
from deepinfer_jax.engine.costs import full_step, step_times
from deepinfer_jax.engine.plan import DraftChoice, Running, View, Waiting
from deepinfer_jax.engine.planner import plan
from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.engine.varlen import PROBE, Lengths, decode_sizes
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner.layout import DraftWord, Part
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


def view(running, verified=None, proposes=True):
    drafting = None if verified is None else lambda *_: DraftChoice(verified, proposes)
    return View(step=5, retired=3, now=0.0, running=running, waiting=(), allocatable=30, pending=0,
                frees=lambda slot: 0, drafting=drafting)  # fmt: skip


def test_every_number_of_sequences_has_programs_of_several_sizes():
    assert [(b.rows, b.parts, b.drafts) for b in decode_sizes(BUCKETS, 1)] == [
        *((1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 1, 3), (8, 4, 3), (12, 4, 3), (16, 4, 3)),
    ]
    assert [(b.rows, b.parts) for b in decode_sizes(BUCKETS, 3)] == [
        *((4, 4), (8, 4), (12, 4), (16, 4)),
    ]


def test_steps_of_prompts_alone_draw_once_for_each():
    made = plan_buckets(limits(slots=4, rows=128, drafts=3, page=64, pages=40), varlen=True)
    assert {b.drafts for b in made if b.rows == 128} == {0, 3}
    assert fit(made, 100, 100, 4).draws == 4
    assert fit(made, 100, 100, 4, 3).draws == 16
    fixed = plan_buckets(limits(slots=4, rows=128, drafts=3, page=64, pages=40))
    assert {b.drafts for b in fixed if b.rows == 128} == {3}


def test_a_plan_brings_all_drafts_unless_a_budget_says_otherwise():
    made = plan(view(decoding(0, 2)), SIZES, BUCKETS)
    assert made.count.tolist() == [4, 4] and made.budget is None
    assert (made.bucket.rows, made.bucket.parts) == (8, 4)
    assert made.running.computed[[0, 2]].tolist() == [13, 13]
    assert made.running.certain[[0, 2]].tolist() == [10, 10]

    made = plan(view(decoding(0, 2), 2), SIZES, BUCKETS)
    assert made.count.tolist() == [4, 4] and made.budget == 2
    assert (made.bucket.rows, made.bucket.drafts) == (8, 3)
    made = plan(view(decoding(0, 2), 0, False), SIZES, BUCKETS)
    assert (made.bucket.rows, made.bucket.drafts, made.budget) == (4, 0, 0)
    ints, _ = pack(made, Draws.greedy(SIZES.slots), {})
    assert made.bucket.split(ints)[1][:2, Part.COUNT].tolist() == [1, 1]
    drafting = made.bucket.split(ints)[4]
    assert (drafting[DraftWord.VERIFIED], drafting[DraftWord.PROPOSES]) == (0, 0)


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


def linear(start, more, drafting=0.0):
    """Times by parts: `start` ms, `more` a row, and of both `drafting` for new drafts."""
    found = {}
    for n in (1, 4):
        sizes = [b.rows for b in decode_sizes(BUCKETS, n)]
        found[n] = StepTimes(CostTable.of([(s, start + more * s) for s in sizes]), drafting)
    return found


def launched(lengths, step, proposes=True, slots=(0, 1)):
    made = plan(view(decoding(*slots), 0, proposes), SIZES, BUCKETS)
    lengths.launched(replace(made, step=step))


def chosen(lengths, step, numbers=(10, 11)):
    """What a step does for sequences in the first slots, when the one before it proposed."""
    launched(lengths, step - 1)
    count = len(numbers)
    return lengths.choice(step, np.arange(count), np.array(numbers), np.full(count, 3))


def note_each(lengths, step, confidence, offered=0, kept=0, ended=False):
    """Step `step` was read: both sequences, how sure their new drafts are, and old ones kept."""
    made = replace(plan(view(decoding(0, 1), 0), SIZES, BUCKETS), step=step)
    out = SimpleNamespace(
        confidence=np.full((2, 3), confidence, np.float32),
        offered=np.full(2, offered),
        accepted=np.full(2, kept),
        ended=np.full(2, ended),
    )
    for part in (0, 1):
        lengths.read(made, part, 10 + part, out)


def test_a_budget_follows_confidences_that_are_two_steps_old():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 3.0))
    unknown = chosen(lengths, 9).verified
    note_each(lengths, 7, 0.01)
    note_each(lengths, 8, 0.99)
    # Drafts nobody has judged yet count as sure.
    assert unknown == 6
    # Two drafts are free: no program for two sequences has fewer than four rows.
    assert chosen(lengths, 9) == DraftChoice(2)
    assert chosen(lengths, 10) == DraftChoice(6)
    # What is known of a slot's last owner says nothing of its next.
    assert chosen(lengths, 9, (20, 21)).verified == 6


def test_steps_that_cost_nothing_more_verify_everything():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1e-6))
    note_each(lengths, 1, 0.05)
    assert chosen(lengths, 9) == DraftChoice(6)


@pytest.mark.parametrize(("confidence", "pays"), [(0.9, True), (0.2, False)])
def test_drafts_are_proposed_where_they_pay(confidence, pays):
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=4.0))
    note_each(lengths, 5, confidence)
    # With 0.2: the best budget promises 2.4 tokens in 14 ms, and without drafts it is 2 in 10.
    assert chosen(lengths, 9).proposes == pays


def test_what_was_proposed_is_used_up_and_a_step_later_there_is_nothing():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 0.1, drafting=9.0))
    note_each(lengths, 5, 0.2)
    last = chosen(lengths, 9)
    assert last == DraftChoice(2, False)
    launched(lengths, 9, proposes=False)
    again = lengths.choice(10, np.arange(2), np.array([10, 11]), np.full(2, 3))
    assert again == DraftChoice(0, False)


def test_now_and_then_drafts_are_tried_again():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=9.0))
    note_each(lengths, 5, 0.1)
    launched(lengths, 8)
    asked = np.arange(2), np.array([10, 11]), np.full(2, 3)
    for step in range(9, 8 + PROBE):
        assert not lengths.choice(step, *asked).proposes
        launched(lengths, step, proposes=False)
    assert lengths.choice(8 + PROBE, *asked) == DraftChoice(0, True)
    launched(lengths, 8 + PROBE)
    # What is heard of them two steps later decides.
    note_each(lengths, 8 + PROBE, 0.99)
    assert not lengths.choice(9 + PROBE, *asked).proposes
    launched(lengths, 9 + PROBE, proposes=False)
    assert lengths.choice(10 + PROBE, *asked) == DraftChoice(0, True)


def test_a_sequence_nothing_is_known_of_is_like_those_before_it():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=4.0))
    prompts = np.arange(0), np.arange(0), np.arange(0)
    assert lengths.choice(2, *prompts).proposes and chosen(lengths, 2).proposes
    for step in range(40):
        note_each(lengths, step, 0.1)
    assert not chosen(lengths, 44, (20, 21)).proposes
    assert not lengths.choice(45, *prompts).proposes


def test_drafts_that_keep_less_than_they_promise_are_proposed_no_more():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=4.0))
    for step in range(1, 40):
        note_each(lengths, step, 0.9, offered=3, kept=3)
    assert chosen(lengths, 44).proposes
    for step in range(40, 80):
        note_each(lengths, step, 0.9, offered=3, kept=0)
    assert not chosen(lengths, 84).proposes


def test_what_is_read_of_the_last_step_says_nothing_of_the_next(monkeypatch):
    monkeypatch.setattr(varlen, "NEWS", 1.0)
    said = []
    for confidence, kept in ((0.0, 0), (0.9, 3)):
        lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=4.0))
        for step in range(1, 8):
            note_each(lengths, step, 0.8, offered=3, kept=2)
            launched(lengths, step + 1)
        # Plain mode: step 8 is read before step 9 is planned, which verifies what it drafted.
        note_each(lengths, 8, confidence, offered=3, kept=kept)
        asked = np.arange(2), np.array([10, 20]), np.full(2, 3)
        said.append((lengths.choice(9, *asked), lengths.choice(9, *(x[:0] for x in asked))))
        launched(lengths, 9)
        said.append((lengths.choice(10, *asked), lengths.choice(10, *(x[:0] for x in asked))))
    assert said[0] == said[2] and said[1] != said[3]


def test_a_sequence_that_has_ended_says_nothing_of_drafts():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1.0, drafting=4.0))
    for step in range(40):
        note_each(lengths, step, 0.1, ended=True)
    assert chosen(lengths, 44, (20, 21)).proposes


def test_only_steps_that_proposed_tell_what_proposing_ones_take():
    times = linear(10.0, 1.0, drafting=4.0)
    lengths = Lengths(SIZES.slots, SIZES.drafts, times)
    made = plan(view(decoding(0, 1), 0), SIZES, BUCKETS)
    for _ in range(20):
        lengths.observe(replace(made, proposes=False), 0.5)
    assert times[4].slope_ms == 0.0
    for _ in range(20):
        lengths.observe(made, 0.5)
    assert times[4].slope_ms == pytest.approx((500 - 14) / 4)


def test_no_draft_takes_a_row_that_a_prompt_waits_for():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 1e-6))
    launched(lengths, 8)
    asked = np.arange(2), np.array([10, 11]), np.full(2, 3)
    assert lengths.choice(9, *asked, crowded=True) == DraftChoice(0, False)
    assert lengths.choice(9, *asked) == DraftChoice(6, True)

    told = []

    def drafting(slots, drafts, crowded):
        told.append(crowded)
        return DraftChoice(0)

    for length in (29, 30):
        running = decoding(0, 1)
        running.request[2], running.prompt[2], running.limit[2] = 12, length, 60
        plan(replace(view(running), drafting=drafting), SIZES, BUCKETS)
    waiting = [
        Waiting(request=20, prompt=30, limit=40, arrival=0.0, deadline=np.inf, drafts=3, replay=4)
    ]
    plan(replace(view(decoding(0, 1)), drafting=drafting, waiting=waiting), SIZES, BUCKETS)
    full = decoding(0, 1, 2, 3)
    plan(replace(view(full), drafting=drafting, waiting=waiting), SIZES, BUCKETS)
    assert told == [False, True, True, False]


def test_after_a_restart_steps_count_anew():
    lengths = Lengths(SIZES.slots, SIZES.drafts, linear(10.0, 3.0))
    note_each(lengths, 7, 0.01)
    launched(lengths, 500)
    lengths.restart()
    launched(lengths, 8)
    assert lengths.choice(9, np.arange(2), np.array([10, 11]), np.full(2, 3)).verified == 6


def test_times_are_measured_on_full_steps_of_every_size(tmp_path, monkeypatch):
    ran, clock = [], [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[-1])

    def run(bucket, ints, floats):
        counts = bucket.split(ints)[1][:, Part.COUNT]
        ran.append((bucket.rows, int(counts.sum()), len(counts), int(counts.max())))
        clock.append(
            clock[-1] + 0.001 * (bucket.rows + 4 * bucket.split(ints)[4][DraftWord.PROPOSES])
        )

    found = step_times(BUCKETS, run, folder=tmp_path, identity={"model": "m"}, ttl_s=60)
    assert sorted(found) == [1, 4]
    assert {rows for rows, *_ in ran} == {b.rows for b in decode_sizes(BUCKETS, 1)}
    assert all(rows == total for rows, total, *_ in ran)
    assert all(most <= 1 + SIZES.drafts for *_, most in ran)
    assert found[1].table.ms.tolist() == pytest.approx([4.0 + n for n in found[1].table.sizes])
    assert [times.drafting_ms for times in found.values()] == pytest.approx([4.0, 4.0])
    ran.clear()
    again = step_times(BUCKETS, run, folder=tmp_path, identity={"model": "m"}, ttl_s=60)
    assert not ran and again[4].table.ms.tolist() == found[4].table.ms.tolist()
    assert again[4].drafting_ms == found[4].drafting_ms


def test_a_full_step_has_no_row_that_is_padding():
    for bucket in decode_sizes(BUCKETS, 1):
        parts = bucket.split(full_step(bucket)[0])[1]
        assert (parts[:, Part.COUNT] > 0).all()
        assert parts[:, Part.COUNT].max() <= bucket.width
