import math
from dataclasses import replace

import numpy as np
import pytest
from engine_loop import Loop, limits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from deepinfer_jax.engine.buckets import plan_buckets
from deepinfer_jax.engine.plan import Running, View, Waiting, refusal
from deepinfer_jax.engine.planner import admission_order, plan
from deepinfer_jax.errors import ConfigError, MemoryPlanError, RequestError


def first_plan(sizes, *waiting, **changed):
    view = dict(step=1, retired=0, now=0.0, running=Running.empty(sizes.slots), waiting=waiting)
    view |= dict(allocatable=sizes.pages - 1, pending=0, frees=lambda slot: 0)
    return plan(View(**{**view, **changed}), sizes, plan_buckets(sizes))


def tokens(length, family=0):
    return [10_000 * family + i + 1 for i in range(length)]


@pytest.mark.parametrize("depth", [0, 1])
def test_one_request_runs_from_its_prompt_to_its_last_token(depth):
    loop = Loop(limits(), depth)
    loop.add(tokens(19), 5)
    loop.drain()
    loop.check_end()
    parts = [(p.start[0], p.count[0], p.draws[0]) for p in loop.plans if p.bucket]
    assert parts == [
        *((0, 8, False), (8, 8, False), (16, 3, True)),
        *((19, 1, True), (20, 1, True), (21, 1, True), (22, 1, True)),
    ]


def test_a_token_drawn_late_ends_a_sequence_without_a_page_or_row_beyond():
    loop = Loop(limits(), depth=1)
    number = loop.add(tokens(3), 20, stop=6)
    loop.drain()
    loop.check_end()
    rows = sum(int(p.count.sum()) for p in loop.plans)
    assert loop.requests[number].tokens == [1, 2, 3, 3, 4, 5]
    assert rows == 3 + 2 + 1, "one row was under way when the end was seen"


@pytest.mark.parametrize("rows", [16, 34, 100, 1000, 4096])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 384, 3000])
def test_chunks_cover_a_prompt_of_any_length_once(rows, length):
    sizes = limits(
        slots=2, rows=rows, page=128, pages=40, max_model_len=4096, table_pages=32, updates=40
    )
    loop = Loop(sizes)
    loop.add(tokens(length), 2)
    loop.drain()
    chunks = [(p.start[0], p.count[0]) for p in loop.plans if p.bucket and p.prefill[0]]
    assert [s for s, _ in chunks] == list(np.cumsum([0, *(c for _, c in chunks)])[:-1])
    assert len(chunks) == math.ceil(length / (rows - rows % 2))
    assert sum(c for _, c in chunks) == length
    loop.check_end()


def test_a_prompt_of_whole_pages_gets_its_next_page_with_its_first_output():
    sizes = limits(page=128, rows=512, pages=12, max_model_len=1000, table_pages=8)
    loop = Loop(sizes)
    loop.add(tokens(256), 3)
    made = loop.step()
    assert made.fresh == 2 and made.updates[:, 1].tolist() == [0, 1]
    assert loop.step().updates[:, 1].tolist() == [2]
    loop.drain()
    loop.check_end()


def test_a_last_token_on_a_page_boundary_needs_no_page():
    loop = Loop(limits(pages=3))
    loop.add(tokens(5), 4)
    loop.drain()
    assert loop.requests[0].outcome == "stop"


def test_prefill_takes_as_many_steps_as_promised_and_decode_never_waits():
    rows, decoding, length = 16, 3, 117
    sizes = limits(slots=5, rows=rows, pages=60, max_model_len=200, table_pages=50, updates=40)
    loop = Loop(sizes)
    for family in range(1, 1 + decoding):
        loop.add(tokens(2, family), 60)
    loop.step()
    loop.add(tokens(length), 2)
    after = math.ceil(length / ((rows - decoding) // 2 * 2))
    for _ in range(after):
        made = loop.step()
        assert np.count_nonzero(~made.prefill) == decoding
    assert made.draws[made.prefill].all() and loop.plans[-2].prefill.any()
    assert not loop.plans[-2].draws[loop.plans[-2].prefill].any()


def test_prompts_longer_than_memory_are_refused_with_the_numbers():
    sizes = limits(pages=5)
    loop = Loop(sizes)
    loop.add(tokens(20), 8)
    loop.add(tokens(3), 2)
    loop.drain()
    assert [r.outcome for r in loop.requests.values()] == ["refused", "stop"]
    ((_, error),) = loop.plans[0].refused
    assert isinstance(error, MemoryPlanError)
    assert str(error) == (
        "Request 0: prompt 20 + output 8 tokens need 7 pages of 4 tokens; there are 4. It could "
        "not end even if it ran alone. Stay within 17 tokens, or give the cache more memory."
    )
    assert refusal(Waiting(request=0, prompt=14, limit=17), sizes) is None
    assert refusal(Waiting(request=0, prompt=14, limit=18), sizes) is not None


def test_sequences_longer_than_the_model_allows_are_refused_with_the_numbers():
    error = refusal(Waiting(request=7, prompt=60, limit=70), limits(pages=100))
    assert isinstance(error, RequestError)
    assert str(error) == (
        "Request 7: prompt 60 + output 10 exceeds max_model_len 64. Nothing was truncated. "
        "Shorten the prompt or lower max_tokens, by 6 tokens together."
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rows": 3},
            "A step has 3 rows for 3 sequences. Each sequence may take one in every step, and a "
            "prompt needs one besides. Set rows to at least 4, or run fewer sequences.",
        ),
        (
            {"page": 5},
            "A page of 5 tokens cannot be used. The compressor makes one entry of two tokens, and "
            "both belong to one page. Use an even page, such as 128.",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(changed, message):
    with pytest.raises(ConfigError) as caught:
        limits(**changed)
    assert str(caught.value) == message


def test_the_queue_is_ordered_by_aged_priority_then_arrival():
    queue = [
        Waiting(request=0, prompt=1, limit=2, priority=1, arrival=0.0),
        Waiting(request=1, prompt=1, limit=2, priority=0, arrival=5.0),
        Waiting(request=2, prompt=1, limit=2, priority=0, arrival=4.0),
        Waiting(request=3, prompt=1, limit=2, priority=9, arrival=9.0, preempted=3),
    ]
    assert [w.request for w in admission_order(queue, 9.0, limits())] == [3, 2, 1, 0]
    assert [w.request for w in admission_order(queue, 10.0, limits())] == [3, 0, 2, 1]


def test_a_low_priority_request_is_admitted_although_better_ones_keep_coming():
    loop = Loop(limits(slots=1, rows=8, aging_s=5.0))
    low = loop.add(tokens(4), 2, priority=4)
    for family in range(1, 200):
        loop.add(tokens(4, family), 2, priority=0)
        loop.step()
        if low not in loop.waiting:
            break
    before = [n for p in loop.plans for n, _ in p.admitted]
    assert before.pop() == low and len(before) > 1
    # Request n came at n - 1 seconds; those that came 4 levels of aging later must wait.
    assert max(before) - 1 < 4 * 5.0


def test_nobody_overtakes_a_request_that_waits_for_pages():
    loop = Loop(limits(pages=9, slots=4))
    loop.add(tokens(17), 8, stop=20)
    loop.step()
    big, small = loop.add(tokens(20, 1), 4), loop.add(tokens(2, 2), 1)
    loop.drain()
    loop.check_end()
    admitted = [number for p in loop.plans for number, _ in p.admitted]
    assert admitted == [0, big, small]


def test_an_admission_leaves_a_page_for_those_that_grow():
    sizes, running = limits(pages=8), Running.empty(3)
    running.request[0], running.prompt[0], running.limit[0] = 5, 8, 40
    running.computed[0], running.allocated[0] = 10, 3
    view = dict(running=running, retired=0, allocatable=4)
    fits = Waiting(request=1, prompt=12, limit=14)
    tight = Waiting(request=1, prompt=13, limit=14)
    assert first_plan(sizes, fits, **view).admitted == ((1, 1),)
    assert first_plan(sizes, tight, **view).admitted == ()
    assert first_plan(sizes, tight, allocatable=4).admitted == ((1, 0),)


def test_a_hit_reads_pages_replays_a_window_and_writes_only_behind():
    loop = Loop(limits(pages=16, rows=16), replay=4)
    loop.add(tokens(13), 2)
    loop.drain()
    loop.add(tokens(13) + [77, 78], 2)
    made = loop.step()
    assert (made.start[0], made.count[0], made.running.write_from[0]) == (8, 7, 12)
    assert made.running.floor[0] == 8
    assert made.fresh == 1 and sorted(made.updates[:, 1].tolist()) == [0, 1, 2, 3]
    loop.drain()
    loop.check_end()


def test_pinned_pages_are_not_counted_again():
    pages = (3, 4, 5)
    request = Waiting(request=0, prompt=14, limit=15, pages=pages, replay=4)
    made = first_plan(limits(pages=5), request, allocatable=1)
    assert made.admitted == ((0, 0),) and made.fresh == 1
    assert made.updates[made.updates[:, 2] > 0].tolist() == [[0, 0, 3], [0, 1, 4], [0, 2, 5]]
    idle = Waiting(request=0, prompt=14, limit=15, pages=pages, replay=4, idle=3)
    assert first_plan(limits(pages=5), idle, allocatable=1).admitted == ()
    assert first_plan(limits(pages=5), idle, allocatable=4).admitted == ((0, 0),)
    other = Waiting(request=1, prompt=1, limit=2)
    assert first_plan(limits(rows=30), idle, other, allocatable=4).admitted == ((0, 0),)
    assert len(first_plan(limits(rows=30), idle, other, allocatable=5).admitted) == 2


def test_a_short_hit_is_a_miss():
    request = Waiting(request=0, prompt=14, limit=15, pages=(3,), replay=4)
    made = first_plan(limits(), request)
    assert (
        made.start[0] == 0 and made.running.write_from[0] == 0 and (made.updates[:, 2] == 0).all()
    )


def test_a_hit_is_cut_to_the_table_entries_of_a_step():
    sizes = limits(slots=2, updates=5, rows=40)
    assert sizes.hit_pages == 2
    request = Waiting(request=0, prompt=30, limit=31, pages=(3, 4, 5, 6), replay=4)
    made = first_plan(sizes, request)
    assert made.running.write_from[0] == 8 and len(made.updates) == 5
    assert made.start[0] + made.count[0] == 20, "as far as the entries go"


def crowded(depth, host_pages=0):
    """Three sequences that outgrow the pages."""
    loop = Loop(limits(pages=10), depth, host_pages=host_pages)
    for family in range(3):
        loop.add(tokens(4, family), 28)
    return loop


@pytest.mark.parametrize("depth", [0, 1])
def test_the_latest_admitted_gives_way_and_goes_on_with_its_output(depth):
    loop = crowded(depth)
    loop.drain()
    loop.check_end()
    assert loop.requests[0].preemptions == 0 and loop.requests[2].preemptions
    _, again = [(p, slot) for p in loop.plans for n, slot in p.admitted if n == 2][:2]
    assert again[0].running.prompt[again[1]] > 4, "outputs are run as a prompt"


def test_a_preempted_sequence_finds_its_published_pages():
    loop = Loop(limits(rows=30))
    loop.add(tokens(4), 28, stop=20)
    loop.add(tokens(24, 1), 20)
    loop.drain()
    loop.check_end()
    assert loop.requests[1].preemptions == 1
    (again,) = [p for p in loop.plans if p.admitted and p.step > 1]
    ((_, slot),) = again.admitted
    assert again.running.write_from[slot] >= 20 and again.start.max() == again.running.floor[slot]


def test_a_preempted_sequence_waits_as_it_came():
    came = Waiting(
        request=3,
        prompt=4,
        limit=30,
        arrival=-7.0,
        deadline=99.0,
        priority=2,
        replay=12,
        keep=3,
        preempted=1,
    )
    run = first_plan(limits(), came).running
    assert run.requeued(0, 9, "recompute") == replace(came, prompt=9, keep=8, preempted=2)
    assert run.requeued(0, 9, "swap") == replace(came, preempted=2, swapped=4)


@pytest.mark.parametrize("depth", [0, 1])
def test_swapped_pages_come_back_as_they_were(depth):
    loop = crowded(depth, host_pages=20)
    loop.drain()
    loop.check_end()
    swaps = [mode for p in loop.plans for _, mode in p.preempted]
    assert swaps and set(swaps) == {"swap"} and loop.host_pages == 20
    again = next(p for p in loop.plans if p.admitted and p.step > 3)
    assert not again.prefill.any(), "it goes on where it stood"


def test_without_room_in_host_memory_it_is_recomputed():
    loop = crowded(1, host_pages=1)
    loop.drain()
    loop.check_end()
    assert {mode for p in loop.plans for _, mode in p.preempted} == {"recompute"}


def test_a_sequence_that_gives_way_pauses_until_its_step_has_retired():
    loop = crowded(1)
    loop.drain()
    index = next(i for i, p in enumerate(loop.plans) if p.preempted)
    ((slot, _),) = loop.plans[index].preempted
    assert slot not in loop.plans[index - 1].slot
    assert slot in loop.plans[index - 2].slot


def full(slots=3, **changed):
    """A view whose slots decode, the last with the better priority; 0 and 1 need a page."""
    running = Running.empty(slots)
    running.request[:], running.prompt[:], running.limit[:] = range(5, 5 + slots), 4, 40
    running.computed[:], running.allocated[:] = [8, 8, 6], [2, 2, 2]
    running.order[:], running.last[:], running.priority[:] = [1, 2, 3], 3, [1, 1, 0]
    view = dict(step=4, retired=3, running=running, allocatable=0, frees=lambda slot: 2)
    return {**view, **changed}


def test_pages_that_come_back_with_a_step_are_waited_for():
    made = first_plan(limits(), **full(pending=2))
    assert not made.preempted and made.slot.tolist() == [2]
    made = first_plan(limits(), **full(pending=1))
    assert made.preempted == ((1, "recompute"),) and made.slot.tolist() == [0, 2]
    made = first_plan(limits(), **full(retired=2))
    assert not made.preempted and made.slot.tolist() == [2], "a step is under way: 1 pauses"


def test_the_first_that_needs_a_page_waits_again_only_for_the_pages_of_an_end():
    state = Planner()
    state.start(
        slots=2, spare_rows=4, pages=11, depth=1, replay=4, host_pages=0, updates=4, strikes=1
    )
    state.add(end=3, family=0, length=19, output=3, priority=1, wait=math.inf)
    state.add_crowd(seed=3648)
    state.add(end=15, family=0, length=11, output=16, priority=0, wait=math.inf)
    state.teardown()
    assert state.loop.longest == 2


@pytest.mark.parametrize(("slots", "pages"), [(3, 12), (2, 11)])
def test_swapped_pages_wait_for_a_step_with_table_entries_for_all_of_them(slots, pages):
    state = Planner()
    state.start(
        slots=slots,
        spare_rows=1,
        pages=pages,
        depth=0,
        replay=8,
        host_pages=6,
        updates=5,
        strikes=2,
    )
    state.add_crowd(seed=1)
    state.teardown()
    assert any(mode == "swap" for made in state.loop.plans for _, mode in made.preempted)


def test_the_first_that_needs_a_page_gets_it():
    view = full(allocatable=1, pending=1)
    assert first_plan(limits(), **view).slot.tolist() == [0, 2]
    view["running"].priority[0] = 2
    assert first_plan(limits(), **view).slot.tolist() == [1, 2]


def test_a_sequence_gives_way_only_if_that_frees_pages():
    made = first_plan(limits(), **full(frees=lambda slot: [1, 0, 1][slot]))
    assert made.preempted == ((0, "recompute"),) and made.slot.tolist() == [1, 2]
    made = first_plan(limits(), **full(frees=lambda slot: 0))
    assert made.preempted == ((1, "recompute"),), "only several ends together free a page"


def test_windows_in_the_middle_of_a_replay_are_not_swapped():
    view = full(host_pages=9)
    assert first_plan(limits(), **view).preempted == ((1, "swap"),)
    view["running"].write_from[1] = 12
    assert first_plan(limits(), **view).preempted == ((1, "recompute"),)
    view = full(host_pages=9)
    assert first_plan(limits(updates=5), **view).preempted == ((1, "recompute"),)


def test_the_oldest_prefill_comes_first():
    running = Running.empty(3)
    running.request[:2], running.prompt[:2], running.limit[:2] = [5, 6], 20, 30
    running.order[:2] = [8, 7]
    made = first_plan(limits(rows=22, pages=20), running=running)
    assert made.slot.tolist() == [1, 0] and made.count.tolist() == [20, 2]


def test_after_three_preemptions_all_pages_are_set_aside():
    often = Waiting(request=1, prompt=4, limit=21, arrival=9.0, preempted=3)
    other = Waiting(request=2, prompt=2, limit=3)
    made = first_plan(limits(pages=7), other, often)
    assert made.admitted == ((1, 0), (2, 1)) and made.fresh == 2
    made = first_plan(limits(pages=6), other, often)
    assert made.admitted == ((1, 0),), "five of five pages belong to it"
    made = first_plan(limits(pages=7), other, often, allocatable=4)
    assert made.admitted == (), "nobody goes ahead of it"


def test_ends_are_named_with_their_reason():
    loop = Loop(limits(slots=1, rows=8))
    loop.add(tokens(4), 30, deadline=4.0)
    loop.add(tokens(4, 1), 3)
    waiting = loop.add(tokens(4, 2), 3, deadline=3.0)
    loop.step()
    loop.aborted.add(1)
    loop.drain()
    loop.check_end()
    assert [r.outcome for r in loop.requests.values()] == ["deadline", "abort", "deadline"]
    assert [e for p in loop.plans for e in p.ended] == [
        (1, None, "abort"),
        (waiting, None, "deadline"),
        (0, 0, "deadline"),
    ]


def test_a_slot_is_used_again_only_when_its_last_step_has_retired():
    loop = Loop(limits(slots=1, rows=8), depth=1)
    loop.add(tokens(2), 30, stop=4)
    loop.add(tokens(2, 1), 1)
    loop.drain()
    first = [i for i, p in enumerate(loop.plans) if 0 in p.slot and p.running.request[0] == 0]
    second = next(i for i, p in enumerate(loop.plans) if (1, 0) in p.admitted)
    assert second == first[-1] + 2, "between them its last step is waited for"


class Planner(RuleBasedStateMachine):
    """Random requests on random small engines; `Loop` checks every plan and every read."""

    @initialize(
        slots=st.integers(1, 4),
        spare_rows=st.integers(1, 12),
        pages=st.integers(4, 14),
        depth=st.integers(0, 1),
        replay=st.sampled_from([4, 8]),
        host_pages=st.sampled_from([0, 0, 6, 30]),
        updates=st.integers(1, 20),
        strikes=st.sampled_from([1, 2, 3]),
    )
    def start(self, slots, spare_rows, pages, depth, replay, host_pages, updates, strikes):
        sizes = limits(
            slots=slots,
            rows=slots + spare_rows,
            pages=pages,
            updates=slots + updates,
            aging_s=20.0,
            strikes=strikes,
        )
        self.loop = Loop(sizes, depth, replay, host_pages)

    @rule(
        length=st.integers(1, 30),
        family=st.integers(0, 2),
        output=st.integers(1, 30),
        end=st.integers(1, 60),
        priority=st.sampled_from([0, 0, 1, 5]),
        wait=st.sampled_from([math.inf, math.inf, math.inf, 5.0, 40.0]),
    )
    def add(self, length, family, output, end, priority, wait):
        stop = length + end if end <= output else None
        deadline = self.loop.now + wait
        self.loop.add(tokens(length, family), output, stop, priority, deadline)

    @rule(seed=st.integers(0, 2**32 - 1))
    def add_crowd(self, seed):
        random, sizes = np.random.default_rng(seed), self.loop.limits
        most = (sizes.pages - 1) * sizes.page
        for _ in range(6):
            length = int(random.integers(1, min(most, 40)))
            output = int(random.integers(1, min(most - length, 23) + 1))
            self.loop.add(tokens(length, int(random.integers(3))), output)

    @rule(steps=st.integers(1, 12))
    def run_on(self, steps):
        for _ in range(steps):
            self.loop.step()

    @rule(data=st.data())
    def abort(self, data):
        if self.loop.requests:
            self.loop.aborted.add(data.draw(st.sampled_from(sorted(self.loop.requests))))

    def teardown(self):
        if hasattr(self, "loop"):
            self.loop.drain()
            self.loop.check_end()


Planner.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestPlanner = Planner.TestCase


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(0, 1))
def test_a_crowd_ends_whatever_the_pages(seed, depth):
    random = np.random.default_rng(seed)
    loop = Loop(limits(pages=int(random.integers(9, 16)), slots=4, rows=9), depth)
    for _ in range(25):
        length, output = random.integers(1, 17, 2)
        loop.add(tokens(int(length), int(random.integers(3))), int(output))
    loop.drain()
    loop.check_end()
    assert {r.outcome for r in loop.requests.values()} == {"stop"}
