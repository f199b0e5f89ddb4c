import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling.original import (
    original_logprobs,
    sample_original,
    verify_original,
)
from deepinfer_jax.sampling.philox import split64

draw = jax.jit(sample_original)
verify = jax.jit(verify_original)


def settings(n, temperature=1.0, top_p=1.0, top_k=-1):
    return (
        jnp.full((n,), temperature, jnp.float32),
        jnp.full((n,), top_p, jnp.float32),
        jnp.full((n,), top_k, jnp.int32),
    )


def keys(n, seed=5):
    return jnp.asarray(np.tile(split64(seed), (n, 1))), jnp.arange(n, dtype=jnp.int32)


def chi_square(tokens, probs):
    expected = probs * len(tokens)
    return float(((np.bincount(tokens, minlength=len(probs)) - expected) ** 2 / expected).sum())


def test_temperature_zero_is_sampling_at_1e_5_without_a_filter():
    n = 400
    logits = jnp.zeros((n, 4), jnp.float32).at[:, 1].set(1.0).at[:, 3].set(1.0)
    seed, position = keys(n)
    got = draw(logits, *settings(n, 0.0, 0.1, 1), seed, position, jnp.zeros((n,), jnp.bool_))
    assert set(got.token.tolist()) == {1, 3}
    assert set(got.kept.tolist()) == {4}


def test_top_k_zero_is_off():
    law = original_logprobs(jnp.zeros((1, 7), jnp.float32), *settings(1, top_k=0))
    assert law.kept.tolist() == [7]


def test_drafts_use_their_own_stream():
    n = 64
    logits = jnp.zeros((n, 64), jnp.float32)
    seed, position = keys(n)
    plain = draw(logits, *settings(n), seed, position, jnp.zeros((n,), jnp.bool_))
    drafts = draw(logits, *settings(n), seed, position, jnp.ones((n,), jnp.bool_))
    shifted, _ = keys(n, 5 + 1_000_000_007)
    same = draw(logits, *settings(n), shifted, position, jnp.zeros((n,), jnp.bool_))
    np.testing.assert_array_equal(drafts.token, same.token)
    assert np.mean(np.asarray(drafts.token) == np.asarray(plain.token)) < 0.2


def test_verified_rows_follow_the_target_whatever_the_draft():
    n, vocab = 30_000, 6
    rng = np.random.default_rng(0)
    target = rng.normal(size=vocab).astype(np.float32)
    drafter = rng.normal(size=vocab).astype(np.float32)
    seed, position = keys(n)
    target_rows = jnp.broadcast_to(jnp.asarray(target), (n, vocab))
    drafter_rows = jnp.broadcast_to(jnp.asarray(drafter), (n, vocab))
    drafted = draw(drafter_rows, *settings(n), seed, position, jnp.ones((n,), jnp.bool_))
    law = original_logprobs(drafter_rows, *settings(n))
    got = verify(target_rows, law.logprobs, drafted.token, *settings(n), seed, position)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum()
            for x in (target, drafter))  # fmt: skip
    assert chi_square(np.asarray(got.token), p) < 30
    overlap = np.minimum(p, q).sum()
    np.testing.assert_allclose(got.accept_prob, overlap, atol=1e-3)
    assert abs(float(np.mean(got.accepted)) - overlap) < 0.02


def test_a_draft_of_minus_one_is_rejected_and_an_empty_residual_takes_the_first_maximum():
    logits = jnp.asarray(np.array([[0, 2, 1, 2]], np.float32))
    seed, position = keys(1)
    law = original_logprobs(logits, *settings(1))
    covering = jnp.zeros((1, 4), jnp.float32)
    token = jnp.array([-1], jnp.int32)
    got = verify(logits, covering, token, *settings(1), seed, position)
    assert got.accepted.tolist() == [False]
    assert got.token.tolist() == [1]
    assert got.accept_prob.tolist() == [1.0]
    same = verify(logits, law.logprobs, jnp.array([3]), *settings(1), seed, position)
    assert same.accepted.tolist() == [True]
    assert same.token.tolist() == [3]


def test_unusable_rows_are_flagged_not_drawn():
    logits = jnp.zeros((3, 8), jnp.float32).at[1, 2].set(jnp.nan)
    seed, position = keys(3)
    got = draw(logits, *settings(3), seed, position, jnp.zeros((3,), jnp.bool_))
    assert got.bad.tolist() == [False, True, False]
    assert got.token.tolist()[1] == 0


def test_masked_tokens_are_never_drawn():
    n = 200
    seed, position = keys(n)
    allowed = jnp.broadcast_to(jnp.arange(8) < 3, (n, 8))
    none = jnp.zeros((n,), jnp.bool_)
    logits = jnp.zeros((n, 8), jnp.float32)
    got = draw(logits, *settings(n), seed, position, none, allowed)
    assert set(got.token.tolist()) == {0, 1, 2}
