"""What sequences take over from others: prefixes, samples of one prompt, pages kept on the host."""

import numpy as np
import pytest
from short_engine import alone, check_empty, drive, few_pages
from short_llm import fewer_sizes

from deepinfer_jax.engine.prefix import Reuse, root_key
from deepinfer_jax.model.flops import skipped_flops
from deepinfer_jax.runner.step import StepOptions

EXACT = Reuse("exact", 128, root_key(b"test", b""))  # 128 >= 16 + 4 * 15: five layers, window 16


@pytest.fixture(scope="module")
def reusing(engine_of):
    return engine_of(reuse=EXACT)


def test_a_prefix_that_was_run_before_is_not_run_again(plain, reusing, sequence_of):
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 250, 390)
    sequences = [sequence_of(i, [*shared, *rng.integers(3, 250, 9 + i)]) for i in range(5)]
    expected = alone(plain, sequence_of, sequences)
    drive(reusing, [(0, sequences[0])])
    assert sequences[0].cached == 0
    before = reusing.meter.prompt_tokens
    drive(reusing, [(i, s) for i, s in enumerate(sequences[1:])])
    assert [s.output for s in sequences] == expected
    # 384 of the tokens are in pages; the last page is replayed, led by four ids for the n-grams.
    assert [s.cached for s in sequences[1:]] == [384 - 128 - 4] * 4
    assert reusing.meter.prompt_tokens - before == sum(len(s.prompt) - 252 for s in sequences[1:])
    assert reusing.meter.cached_tokens >= 4 * 252


def test_a_conversation_goes_on_where_its_answer_ended(plain, reusing, sequence_of):
    first = sequence_of(0, np.arange(250) % 200 + 5, max_tokens=140)
    drive(reusing, [(0, first)])
    again = sequence_of(1, [*first.tokens, 9, 9, 9])
    expected = alone(plain, sequence_of, [again])
    drive(reusing, [(0, again)])
    assert again.cached == 384 - 132
    assert [again.output] == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_samples_of_one_prompt_run_it_once(plain, engine_of, sequence_of, overlap):
    engine = engine_of(overlap=overlap)
    prompt = np.random.default_rng(3).integers(3, 250, 201)
    samples = [sequence_of(0, prompt)]
    samples += [sequence_of(0, prompt, samples[0], i, max_tokens=140) for i in range(1, 4)]
    expected = []
    for i, sample in enumerate(samples):
        one = sequence_of(0, prompt, index=i, max_tokens=sample.params.max_tokens)
        drive(plain, [(0, one)])
        expected.append(one.output)
    assert len(set(map(tuple, expected))) == 4
    drive(engine, [(0, s) for s in samples])
    assert [s.output for s in samples] == expected
    # The others run the prompt's last token alone, for a draw of their own.
    assert engine.meter.prompt_tokens == 201 + 3
    assert [s.cached for s in samples] == [0, 200, 200, 200]


def test_samples_without_a_slot_run_their_prompt_later(plain, reusing, sequence_of):
    prompt = np.random.default_rng(4).integers(3, 250, 150)
    samples = [sequence_of(0, prompt, max_tokens=3)]
    samples += [sequence_of(0, prompt, samples[0], i) for i in range(1, 9)]
    expected = []
    for i, sample in enumerate(samples):
        one = sequence_of(0, prompt, index=i, max_tokens=sample.params.max_tokens)
        drive(plain, [(0, one)])
        expected.append(one.output)
    drive(reusing, [(0, s) for s in samples], aborts=[(1, 5), (7, 7)])
    for place, sample in enumerate(samples):
        if place not in (5, 7):
            assert sample.output == expected[place]
    assert samples[5].finish_reason == samples[7].finish_reason == "abort"


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_wait_on_the_host_come_back_as_they_were(plain, engine_of, sequence_of, overlap):
    prompts = [np.full(110 + i, 60 + i) for i in range(3)]
    sequences = [sequence_of(i, p, max_tokens=40) for i, p in enumerate(prompts)]
    expected = alone(plain, sequence_of, sequences)
    engine = few_pages(engine_of(host_pages=2, overlap=overlap), 3)
    drive(engine, [(0, s) for s in sequences])
    assert [s.output for s in sequences] == expected
    assert engine.meter.preempted > 0
    # Nothing was run twice.
    assert engine.meter.prompt_tokens == sum(map(len, prompts))


def test_a_sequence_that_waits_on_the_host_can_be_aborted(engine_of, plain, sequence_of):
    prompts = [np.full(110 + i, 60 + i) for i in range(3)]
    sequences = [sequence_of(i, p, max_tokens=40) for i, p in enumerate(prompts)]
    expected = alone(plain, sequence_of, sequences)
    engine = few_pages(engine_of(host_pages=2), 3)
    numbers = [engine.add(s) for s in sequences]
    while not engine.meter.preempted:
        engine.step()
    engine.abort(numbers[2])
    while engine.has_work:
        engine.step()
    check_empty(engine)
    assert [s.output for s in sequences[:2]] == expected[:2]
    assert sequences[2].finish_reason == "abort"
    assert sequences[2].output == expected[2][: len(sequences[2].output)]


def test_bounded_replay_of_the_decoder_hides_or_leaves_out_the_same_rows(
    llm, engine_of, sequence_of
):
    # One slot and no bucket of one row, so that few programs are compiled.
    keep, sizes = 22, {"slots": 1, "rows": 32}
    with fewer_sizes(lambda planned: planned[1:]):
        mask = engine_of(options=StepOptions(truncate="mask"), keep=keep, limits=sizes)
        compact = engine_of(options=StepOptions(truncate="compact"), keep=keep, limits=sizes)
    prompts = [np.random.default_rng(i).integers(3, 250, 110 + i) for i in range(3)]
    made = []
    for engine in (mask, compact):
        sequences = [sequence_of(i, p, max_tokens=25) for i, p in enumerate(prompts)]
        drive(engine, [(0, s) for s in sequences])
        made.append([s.output for s in sequences])
    assert made[0] == made[1]
    rows = sum(map(len, prompts)) - 3 * keep
    assert compact.meter.skipped_rows == rows
    assert compact.meter.skipped_flops == skipped_flops(llm.config, rows) > 0
    assert mask.meter.skipped_rows == 0
