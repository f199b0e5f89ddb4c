"""Nano's batches: pure in their request, even segments, weights on the assistant's own tokens."""

import numpy as np
import pytest

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills.conversation import conversation
from deepinfer_jax.skills.families import SKILLS, sample
from deepinfer_jax.skills.mixture import SHARES
from deepinfer_jax.skills.sample import HELD_OUT_SEED
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.nano_data import (
    DECODER_ROWS,
    LONG_SHAPE,
    NANO,
    SHORT_SHAPE,
    Producer,
    Request,
    make_batch,
    target_weights,
    vocabulary_texts,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(NANO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return vocabulary_texts(tokenizer)


@pytest.fixture(scope="module")
def batches(tokenizer, vocabulary):
    requests = {shape: Request(shape, 1, 7, 1.0) for shape in ("short", "long")}
    return {shape: make_batch(r, tokenizer, vocabulary) for shape, r in requests.items()}


def same(a, b):
    return all(
        np.array_equal(getattr(a, key), getattr(b, key))
        for key in ("ids", "segment", "weight", "skill")
    )


def runs(row):
    """(segment, start, end) of the conversations of a row."""
    for segment in range(1, row.max() + 1):
        places = np.flatnonzero(row == segment)
        yield segment, int(places[0]), int(places[-1]) + 1


def test_a_batch_is_a_function_of_its_request(tokenizer, vocabulary, batches):
    again = make_batch(Request("short", 1, 7, 1.0), tokenizer, vocabulary)
    assert same(again, batches["short"])
    for other in (Request("short", 1, 8, 1.0), Request("short", 2, 7, 1.0)):
        assert not same(make_batch(other, tokenizer, vocabulary), batches["short"])


@pytest.mark.parametrize(("shape", "size"), [("short", SHORT_SHAPE), ("long", LONG_SHAPE)])
def test_arrays_have_their_shapes_and_types(shape, size, batches):
    batch = batches[shape]
    kinds = {"ids": np.int32, "segment": np.int32, "weight": np.float32, "skill": np.int8}
    for key, kind in kinds.items():
        assert getattr(batch, key).shape == size and getattr(batch, key).dtype == kind


@pytest.mark.parametrize("shape", ["short", "long"])
def test_segments_are_unbroken_start_even_and_are_whole_conversations(shape, batches, tokenizer):
    batch = batches[shape]
    for row in range(len(batch.ids)):
        for segment, start, end in runs(batch.segment[row]):
            assert start % 2 == 0
            assert (batch.segment[row, start:end] == segment).all()
            assert batch.ids[row, start] == tokenizer.bos_id
            assert batch.ids[row, end - 1] == tokenizer.eos_id
            assert len(set(batch.skill[row, start:end])) == 1
    padding = batch.segment == 0
    assert (batch.ids[padding] == tokenizer.pad_id).all() and (batch.skill[padding] == -1).all()
    assert (batch.weight[padding] == 0).all()


def test_short_rows_are_nearly_full_and_hold_every_skill(batches):
    batch = batches["short"]
    assert (batch.segment > 0).mean() > 0.95
    assert set(np.unique(batch.skill)) >= {SKILLS.index(s) for s in SKILLS if s != "tool_reply"}


def test_long_rows_keep_all_targets_in_the_decoder_rows(batches, tokenizer):
    batch = batches["long"]
    assert batch.decoder_start == LONG_SHAPE[1] - DECODER_ROWS
    assert (batch.weight[:, : batch.decoder_start] == 0).all()
    for row in range(len(batch.ids)):
        assert batch.segment[row, -2] == 1
        answers = (batch.ids[row] == tokenizer.eos_id).sum()
        assert answers == DECODER_ROWS // 23


def test_long_documents_shrink_with_the_level(tokenizer, batches):
    easy = make_batch(Request("long", 1, 7, 0.0), tokenizer)
    assert (easy.segment > 0).mean() < 0.5 * (batches["long"].segment > 0).mean()


def test_weights_average_one_over_the_targets(batches):
    for batch in batches.values():
        assert batch.weight[batch.weight > 0].mean() == pytest.approx(1, abs=1e-5)


def test_targets_are_the_assistants_tokens_with_eos(tokenizer):
    for i in range(30):
        s = sample("follow_up", 3, i)
        ids = np.asarray(tokenizer.encode_pieces(conversation(s)), np.int32)
        weight = target_weights(ids, tokenizer)
        text = tokenizer.decode(ids[1:][weight[:-1] > 0])
        wanted = [m["content"] for m in s.messages if m["role"] == "assistant"]
        reasoning = s.messages[-1].get("reasoning_content", "")
        mark = spellings.THINK_END if s.thinking else ""
        wanted[-1] = f"{reasoning}{mark}{wanted[-1]}"
        assert text == "".join(w + spellings.EOS for w in wanted)
        assert weight[-1] == 0


def test_a_run_of_n_tokens_weighs_one_over_root_n_each(tokenizer):
    s = sample("sum_worked", 3, 0)
    ids = np.asarray(tokenizer.encode_pieces(conversation(s)), np.int32)
    weight = target_weights(ids, tokenizer)
    think_end = int(np.flatnonzero(ids == tokenizer.special(spellings.THINK_END))[-1])
    reasoning, answer = weight[:think_end], weight[think_end:]
    for run in (reasoning[reasoning > 0], answer[answer > 0]):
        assert run == pytest.approx(len(run) ** -0.5) and len(run) > 1
    assert (answer > 0).sum() == len(s.answer) + 1


def test_an_empty_reasoning_joins_the_answer(tokenizer):
    s = next(s for i in range(50) if (s := sample("sort", 3, i)).thinking)
    ids = np.asarray(tokenizer.encode_pieces(conversation(s)), np.int32)
    weight = target_weights(ids, tokenizer)
    assert len(set(weight[weight > 0].tolist())) == 1


def test_only_the_last_turn_is_a_target_when_the_sample_says_so(tokenizer):
    s = next(s for i in range(50) if (s := sample("follow_up", 3, i)).kind == "sum")
    ids = np.asarray(tokenizer.encode_pieces(conversation(s)), np.int32)
    first_end = int(np.flatnonzero(ids == tokenizer.eos_id)[0])
    assert (target_weights(ids, tokenizer)[:first_end] > 0).any()
    assert not (target_weights(ids, tokenizer, final_only=True)[:first_end] > 0).any()


def test_held_out_seeds_are_refused(tokenizer):
    with pytest.raises(ConfigError, match=f"with seed {HELD_OUT_SEED}. Training uses seeds"):
        make_batch(Request("short", HELD_OUT_SEED, 0, 0.0), tokenizer)


def test_workers_make_the_same_batches_in_order(tokenizer, vocabulary):
    requests = [Request("short", 1, i, 0.0) for i in range(3)]
    parts = SHARES | {"sum_direct": 0.5}
    with Producer(NANO, workers=1, parts=parts) as producer:
        made = list(producer.batches(iter(requests), ahead=1))
    assert len(made) == 3
    for request, batch in zip(requests, made, strict=True):
        assert same(batch, make_batch(request, tokenizer, vocabulary, parts))
    assert not same(made[0], make_batch(requests[0], tokenizer, vocabulary))


def test_a_producer_outside_its_block_is_refused():
    with pytest.raises(ConfigError, match="producer of 2 workers is not running"):
        next(Producer(NANO, workers=2).batches([Request("short", 1, 0, 0.0)]))
