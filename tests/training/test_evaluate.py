from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.batches import SyntheticBatch
from deepinfer_jax.training.evaluate import (
    exact_match,
    held_out_long,
    held_out_of,
    held_out_short,
    runs,
)
from deepinfer_jax.training.steps import data_mesh


def test_runs_are_the_stretches_of_positive_weight():
    weight = np.array([0, 1, 2, 0, 3, 0, 0, 1], np.float32)
    assert runs(weight) == [(1, 3), (4, 5), (7, 8)]


def test_an_answer_counts_only_when_all_its_tokens_are_right():
    weight = np.zeros((2, 8), np.float32)
    weight[0, 2:4] = weight[0, 6] = weight[1, 4:8] = 1
    ids = np.zeros((2, 8), np.int32)
    skill = np.where(weight > 0, [[0], [1]], -1).astype(np.int8)
    held_out = held_out_of([SyntheticBatch(ids, ids + 1, weight, skill)], 2, ("a", "b"))
    wrong = np.ones((2, 6), bool)
    wrong[0, 1] = False  # column 3, inside the first answer of row 0
    found = exact_match(
        held_out, lambda *_: jnp.asarray(wrong), {}, data_mesh(jax.devices()[:1]), 2
    )
    assert found == {"a": (1, 2), "b": (1, 1)}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(Path(deepinfer_jax.__file__).parent / "models" / "nano")


def test_held_out_rows_are_full_and_every_span_predicts_an_end_of_sentence(tokenizer):
    held_out = held_out_short(tokenizer, 4, 1024)
    ids, segment = held_out.batch["ids"], held_out.batch["segment"]
    assert (segment > 0).mean() > 0.8
    assert len(held_out.spans) > 8
    for span in held_out.spans:
        assert ids[span.row, span.high] == tokenizer.eos_id
        inside = segment[span.row, span.low : span.high + 1]
        assert inside.min() == inside.max() > 0


def test_held_out_documents_end_in_answers_within_the_decoder_rows(tokenizer):
    held_out = held_out_long(tokenizer, 2, 2048, 512)
    assert held_out.decoder_start == 1536
    assert min(span.low for span in held_out.spans) >= 1536
    for span in held_out.spans:
        assert held_out.batch["ids"][span.row, span.high] == tokenizer.eos_id
