from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling.recompute import recompute, seeded_logits
from deepinfer_jax.sampling.sampler import processed_logprobs

GOLDEN = Path(__file__).parents[1] / "golden" / "sampler.npz"


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def recomputed(golden):
    return recompute(golden, jax.jit)


def per_row(golden):
    return {k: v for k, v in golden.items() if v.shape == golden["task"].shape}


def test_seeded_logits_equal_the_stored_ones_bit_for_bit(golden):
    for row, stored in zip(golden["logits_512_row"], golden["logits_512"], strict=True):
        made = seeded_logits(str(golden["kind"][row]), int(golden["logits_seed"][row]), 512)
        np.testing.assert_array_equal(made, stored)


def test_every_robust_row_has_the_original_token_acceptance_and_kept_count(golden, recomputed):
    robust = golden["robust"]
    for name in ("token", "accepted", "kept"):
        np.testing.assert_array_equal(recomputed[name][robust], golden[name][robust])


def test_at_least_nine_in_ten_of_all_rows_have_the_original_token(golden, recomputed):
    assert np.mean(recomputed["token"] == golden["token"]) >= 0.9


def test_acceptance_probabilities_agree_within_1e_5(golden, recomputed):
    np.testing.assert_allclose(recomputed["accept_prob"], golden["accept_prob"], atol=1e-5, rtol=0)


def test_results_do_not_need_a_compiler_and_ignore_stored_results(golden, recomputed):
    rows = np.flatnonzero((golden["vocab"] == 512) & (golden["task"] == "fresh"))[:8]
    blanked = {k: v[rows] for k, v in per_row(golden).items()}
    blanked["token"] = np.zeros_like(blanked["token"])
    got = recompute(blanked)
    for name, value in recomputed.items():
        np.testing.assert_array_equal(got[name], value[rows])


def test_the_stable_filter_keeps_as_many_as_the_original(golden):
    small = (golden["vocab"] == 512) & (golden["task"] == "fresh") & (golden["temperature"] > 0.01)
    pairs = zip(golden["kind"][small], golden["logits_seed"][small], strict=True)
    logits = np.stack([seeded_logits(str(kind), int(seed), 512) for kind, seed in pairs])
    settings = [jnp.asarray(golden[name][small]) for name in ("temperature", "top_p", "top_k")]
    law = processed_logprobs(jnp.asarray(logits), *settings)
    np.testing.assert_array_equal(law.kept, golden["kept"][small])


def test_a_missing_column_is_named(golden):
    arrays = per_row(golden)
    del arrays["seq_seed"]
    with pytest.raises(RequestError) as refusal:
        recompute(arrays)
    assert str(refusal.value) == (
        "The recording lacks 1 of its 13 columns: seq_seed. A draw is recomputed from its seeds "
        "and settings alone, so each must be there. Add the columns, one value per row."
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("task", "guess", "Column task holds 'guess'. It may hold 'fresh', 'verify'. Correct"),
        ("draft_mix", "far", "Column draft_mix holds 'far'. It may hold '', 'same', 'near', "),
        ("kind", "spiky", "Logits of kind 'spiky' are unknown. A recording names one of bell, "),
    ],
)
def test_an_unknown_name_is_refused(golden, column, value, message):
    arrays = {k: v[:1].copy() for k, v in per_row(golden).items()}
    arrays[column] = np.array([value])
    with pytest.raises(RequestError) as refusal:
        recompute(arrays)
    assert message in str(refusal.value)


def test_uneven_columns_and_a_verification_row_without_draft_are_refused(golden):
    arrays = {k: v[:2].copy() for k, v in per_row(golden).items()}
    with pytest.raises(RequestError) as refusal:
        recompute(arrays | {"top_p": np.ones(3, np.float32)})
    assert "Columns of unequal length: task (2,), top_p (3,). Every column" in str(refusal.value)
    with pytest.raises(RequestError) as refusal:
        recompute(arrays | {"task": np.array(["fresh", "verify"])})
    assert "Verification row 1 has no draft_mix. Its draft distribution" in str(refusal.value)


def test_logits_that_cannot_be_drawn_from_are_refused(golden, monkeypatch):
    arrays = {k: v[:1].copy() for k, v in per_row(golden).items()}
    monkeypatch.setattr(
        "deepinfer_jax.sampling.recompute.seeded_logits",
        lambda kind, seed, size: np.full(size, np.nan, np.float32),
    )
    with pytest.raises(RequestError) as refusal:
        recompute(arrays)
    assert "Row 0 has logits that cannot be drawn from. NaN, +inf, or" in str(refusal.value)
