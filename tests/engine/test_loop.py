"""The loop on a real network: every order of events writes the tokens of a lone sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_engine import SLOTS, alone, check_empty, drive, few_pages, requests

from deepinfer_jax.errors import MemoryPlanError, RequestError


@pytest.fixture(scope="module")
def overlapped(engine_of):
    return engine_of()


@pytest.fixture(scope="module")
def short_of_pages(engine_of):
    """Three pages for four slots: sequences wait for pages and give them up."""
    return few_pages(engine_of(), 3)


def test_all_orders_of_events_write_the_same_tokens(plain, overlapped, short_of_pages, sequence_of):
    expected = None
    for engine in (plain, overlapped, short_of_pages):
        sequences, rng = requests(sequence_of, 0, 24, 120)
        if expected is None:
            expected = alone(plain, sequence_of, sequences)
        when = np.sort(rng.integers(0, 60, len(sequences))).tolist()
        drive(engine, list(zip(when, sequences, strict=True)))
        assert [s.output for s in sequences] == expected
        assert {s.finish_reason for s in sequences} == {"length"}


def test_sequences_that_give_up_their_pages_go_on_as_if_they_had_not(
    plain, short_of_pages, sequence_of
):
    # Each starts in one page and needs two in the end, and there are three.
    prompts = [np.full(110 + i, 60 + i) for i in range(3)]
    sequences = [sequence_of(i, p, max_tokens=40) for i, p in enumerate(prompts)]
    expected = alone(plain, sequence_of, sequences)
    before = short_of_pages.meter.preempted
    drive(short_of_pages, [(0, s) for s in sequences])
    assert [s.output for s in sequences] == expected
    assert short_of_pages.meter.preempted > before


def test_aborted_sequences_leave_no_trace_in_the_others(plain, overlapped, sequence_of):
    sequences, _ = requests(sequence_of, 2, 12, 90)
    expected = alone(plain, sequence_of, sequences)
    drive(overlapped, [(0, s) for s in sequences], aborts=[(3, 1), (9, 5), (4, 11), (20, 8)])
    for place, (sequence, tokens) in enumerate(zip(sequences, expected, strict=True)):
        if sequence.finish_reason == "abort":
            assert place in (1, 5, 8, 11)
            assert sequence.output == tokens[: len(sequence.output)]
        else:
            assert sequence.output == tokens
    assert sequences[1].finish_reason == "abort"


def test_a_deadline_ends_a_sequence_with_what_it_has(overlapped, sequence_of):
    late, other = sequence_of(0, [60] * 5), sequence_of(1, [61] * 5)
    overlapped.add(late, deadline=0.0)
    overlapped.add(other)
    while overlapped.has_work:
        overlapped.step()
    assert late.finish_reason == "abort" and isinstance(late.error, RequestError)
    assert str(late.error) == (
        "The deadline passed after 0 tokens. The request was to end by then, whatever had been "
        "produced. Give it more time, or lower max_tokens."
    )
    assert other.finish_reason == "length" and len(other.output) == 12


def test_a_prompt_that_no_memory_holds_is_refused_with_the_numbers(engine_of, sequence_of):
    long = sequence_of(0, [60] * 500)
    drive(engine_of(limits={"pages": 1 + 3}), [(0, long)])
    assert isinstance(long.error, MemoryPlanError)
    assert "need 4 pages of 128 tokens; there are 3" in str(long.error)


def test_decoding_goes_on_beside_a_long_prompt(overlapped, sequence_of):
    running, long = sequence_of(0, [60] * 4, max_tokens=30), sequence_of(1, [61] * 900)
    overlapped.add(running)
    for _ in range(4):
        overlapped.step()
    overlapped.add(long)
    seen = []
    while not long.output:
        overlapped.step()
        seen.append(len(running.output))
    # Every step of the prompt's fifteen brought a token of the other one.
    assert all(b - a == 1 for a, b in zip(seen, seen[1:], strict=False))
    while overlapped.has_work:
        overlapped.step()


def test_nothing_is_left_of_a_slot_s_last_owner(engine_of, plain, sequence_of):
    engine = engine_of()
    first = [sequence_of(i, [70 + i] * 80) for i in range(SLOTS)]
    drive(engine, [(0, s) for s in first])

    def spoiled(leaf):
        return jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    # Windows, pages and raw rows of nobody hold no number at all.
    engine._run(lambda state: (jax.tree.map(spoiled, state), None)).result()
    again = [sequence_of(i, [80 + i] * n, max_tokens=30) for i, n in enumerate((3, 90, 130, 1))]
    expected = alone(plain, sequence_of, again)
    drive(engine, [(0, s) for s in again])
    assert [s.output for s in again] == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the device is gone")])
def test_what_breaks_a_step_off_leaves_an_engine_that_runs(
    overlapped, plain, sequence_of, monkeypatch, error
):
    fresh = [sequence_of(i, [90 + i] * 70) for i in range(3)]
    expected = alone(plain, sequence_of, fresh)
    collect, calls = overlapped._collect, []

    def broken():
        calls.append(1)
        if len(calls) == 3:
            raise error
        return collect()

    monkeypatch.setattr(overlapped, "_collect", broken)
    with pytest.raises(type(error)):
        list(overlapped.run([sequence_of(i, [70 + i] * 100, max_tokens=30) for i in range(6)]))
    assert not overlapped.has_work
    list(overlapped.run(fresh))
    assert [s.output for s in fresh] == expected


def test_a_stream_that_is_closed_gives_its_slots_and_pages_back(overlapped, plain, sequence_of):
    stream = overlapped.run([sequence_of(i, [70 + i] * 100, max_tokens=30) for i in range(6)])
    next(stream)
    stream.close()
    check_empty(overlapped)
    again = [sequence_of(0, [99] * 9)]
    expected = alone(plain, sequence_of, again)
    list(overlapped.run(again))
    assert again[0].output == expected[0]
