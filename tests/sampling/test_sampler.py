import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.sampling.philox import split64
from deepinfer_jax.sampling.sampler import (
    Purpose,
    RowParams,
    gumbel_noise,
    processed_logprobs,
    raw_logprobs,
    sample,
    top_logprobs,
)

draw = jax.jit(sample)
law_of = jax.jit(processed_logprobs)


def rows_of(n, temperature=1.0, top_p=1.0, top_k=-1, seed=17, position=0):
    seeds = np.stack([split64(int(s)) for s in np.broadcast_to(seed, n)])
    return RowParams(
        jnp.asarray(np.broadcast_to(np.float32(temperature), n)),
        jnp.asarray(np.broadcast_to(np.float32(top_p), n)),
        jnp.asarray(np.broadcast_to(np.int32(top_k), n)),
        jnp.asarray(seeds),
        jnp.asarray(np.broadcast_to(np.asarray(position, np.int32), n)),
    )


def mixed_batch(n, vocab, seed=0):
    rng = np.random.default_rng(seed)
    logits = (4 * rng.normal(size=(n, vocab))).astype(np.float32)
    which = np.arange(n)
    rows = rows_of(
        n,
        np.where(which % 4 == 0, 0, rng.uniform(0.3, 1.5, n)),
        np.where(which % 3 == 0, 1, rng.uniform(0.1, 1, n)),
        np.where(which % 5 < 3, -1, rng.integers(1, 60, n)),
        rng.integers(0, 2**63, n),
        rng.integers(0, 10**6, n),
    )
    return jnp.asarray(logits), rows


def plain_filter(logits, temperature, top_p, top_k):
    """The kept ids by the definition: highest first, ties by lowest id, the shorter prefix."""
    x = logits.astype(np.float64) / temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = sorted(range(len(x)), key=lambda i: (-logits[i], i))
    order = [i for i in order if np.isfinite(logits[i])]
    kept, mass = [], 0.0
    for i in order:
        if 0 < top_k <= len(kept) or (top_p < 1 and mass >= top_p):
            break
        kept.append(i)
        mass += probs[i]
    return sorted(kept)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_any_order():
    logits, rows = mixed_batch(64, 1000)
    whole = draw(logits, rows)

    def check(index):
        part = draw(logits[index], jax.tree.map(lambda a: a[index], rows))
        for got, want in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(got, want[index])

    for i in range(20):
        check(np.array([i]))
    for size in (3, 33):
        check(np.arange(size) + 11)
    check(np.random.default_rng(1).permutation(64))


def test_the_draw_is_the_same_bits_compiled_or_not():
    logits, rows = mixed_batch(8, 512)
    for got, want in zip(
        jax.tree.leaves(sample(logits, rows)), jax.tree.leaves(draw(logits, rows)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_temperature_zero_takes_the_lowest_id_of_the_largest_logits():
    logits = np.zeros((3, 40), np.float32)
    logits[0, [7, 30]] = 2.0
    logits[1, [39]] = 1e-6
    logits[2] = -5.0
    got = draw(jnp.asarray(logits), rows_of(3, temperature=0.0, top_p=0.5, top_k=3, seed=99))
    assert got.token.tolist() == [7, 39, 0]
    assert got.kept.tolist() == [1, 1, 1]
    assert got.processed_logprob.tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(got.raw_logprob[2], -np.log(40), rtol=1e-6)


def test_top_k_1_equals_greedy_at_any_temperature():
    logits, _ = mixed_batch(64, 512)
    hot = draw(logits, rows_of(64, temperature=5.0, top_k=1, position=np.arange(64)))
    np.testing.assert_array_equal(hot.token, jnp.argmax(logits, axis=-1))
    assert set(hot.kept.tolist()) == {1}


def test_the_smallest_temperature_is_finite_and_tiny_top_p_keeps_one():
    logits, _ = mixed_batch(4, 64)
    tiny = np.finfo(np.float32).tiny
    got = draw(logits, rows_of(4, temperature=[tiny, tiny, 1.0, 1.0], top_p=[1, 0.5, 1e-30, 1e-45]))
    np.testing.assert_array_equal(got.token, jnp.argmax(logits, axis=-1))
    assert np.isfinite(got.processed_logprob).all()
    assert got.kept.tolist()[1:] == [1, 1, 1]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 0.8, -1), (1.4, 1.0, 5), (2, 0.9, 9)]
)
def test_draws_follow_the_processed_distribution(temperature, top_p, top_k):
    n, vocab = 40_000, 19
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 1.5
    batch = jnp.broadcast_to(jnp.asarray(logits), (n, vocab))
    got = draw(batch, rows_of(n, temperature, top_p, top_k, position=np.arange(n)))
    kept = plain_filter(logits, temperature, top_p, top_k)
    expected = np.exp(logits.astype(np.float64) / temperature)[kept]
    expected *= n / expected.sum()
    counts = np.bincount(got.token, minlength=vocab)
    assert counts.sum() == counts[kept].sum()
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 5


def test_draws_are_independent_of_seed_neighbours_and_purposes():
    n = 20_000
    flat = jnp.zeros((n, 4), jnp.float32)
    first = np.asarray(draw(flat, rows_of(n, position=np.arange(n))).token)
    others = [
        draw(flat, rows_of(n, position=np.arange(n), seed=18)).token,
        draw(flat, rows_of(n, position=np.arange(1, n + 1))).token,
        sample(flat, rows_of(n, position=np.arange(n)), purpose=Purpose.DRAFT).token,
    ]
    for other in others:
        assert abs(float(np.mean(first == np.asarray(other))) - 0.25) < 0.02


def test_noise_is_the_stated_function_of_seed_position_and_token():
    noise = np.asarray(gumbel_noise(rows_of(1, seed=2**40 + 3).seed, jnp.array([77]), 10))
    longer = np.asarray(gumbel_noise(rows_of(3, seed=2**40 + 3).seed, jnp.array([1, 77, 2]), 512))
    np.testing.assert_array_equal(noise[0], longer[1, :10])
    for token in range(10):
        word = reference_philox(2**40 + 3, [token // 4, 0, 77, 0])[token % 4]
        exact = -np.log(-np.log1p(-(word + 0.5) / 2**32))
        np.testing.assert_allclose(noise[0, token], exact, rtol=2e-6, atol=1e-6)


def reference_philox(key, counter):
    k, c = [key & 0xFFFFFFFF, key >> 32], list(counter)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_noise_is_finite_at_both_ends_of_the_words(monkeypatch):
    words = jnp.asarray(np.array([[0, 2**31 - 1, 2**31, 2**32 - 1]], np.uint32))
    monkeypatch.setattr(
        "deepinfer_jax.sampling.sampler.philox4x32", lambda key, counter: tuple(words.T[:, :, None])
    )
    noise = np.asarray(gumbel_noise(rows_of(1).seed, jnp.array([0]), 4))[0]
    exact = [-np.log(-np.log1p(-(int(w) + 0.5) / 2**32)) for w in words[0]]
    np.testing.assert_allclose(noise, exact, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-12, 12), min_size=24, max_size=24),
    ruled_out=st.sets(st.integers(0, 23), max_size=20),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.0513, 0.31, 0.777, 0.93, 0.9991, 1.0]),
    top_k=st.integers(-1, 30),
)
def test_the_filter_keeps_what_the_definition_keeps(values, ruled_out, temperature, top_p, top_k):
    logits = np.array(values, np.float32) / 4
    logits[list(ruled_out)] = -np.inf
    rows = rows_of(1, temperature, top_p, top_k)
    law = law_of(jnp.asarray(logits)[None], rows.temperature, rows.top_p, rows.top_k)
    kept = np.flatnonzero(np.isfinite(law.logprobs[0])).tolist()
    assert kept == plain_filter(logits, np.float32(temperature), np.float32(top_p), top_k)
    assert law.kept.tolist() == [len(kept)]
    np.testing.assert_allclose(np.exp(law.logprobs[0]).sum(), 1, rtol=1e-5)


def test_of_equal_logits_the_lowest_ids_are_kept():
    flat = jnp.zeros((2, 8), jnp.float32)
    rows = rows_of(2, top_p=[0.5, 1.0], top_k=[-1, 3])
    law = law_of(flat, rows.temperature, rows.top_p, rows.top_k)
    np.testing.assert_array_equal(np.isfinite(law.logprobs[0]), np.arange(8) < 4)
    np.testing.assert_array_equal(np.isfinite(law.logprobs[1]), np.arange(8) < 3)


def test_a_masked_token_is_never_drawn_and_raw_logprobs_ignore_the_mask():
    n = 500
    logits = jnp.broadcast_to(jnp.arange(16, dtype=jnp.float32) / 4, (n, 16))
    allowed = jnp.broadcast_to(jnp.arange(16) % 5 == 1, (n, 16))
    cold_half = np.where(np.arange(n) % 2, 0.0, 1.0)
    got = draw(logits, rows_of(n, cold_half, position=np.arange(n)), allowed)
    assert set(got.token.tolist()) == {1, 6, 11}
    assert set(got.token.tolist()[1::2]) == {11}
    assert set(got.kept.tolist()[0::2]) == {3}
    raw = jax.nn.log_softmax(logits)[jnp.arange(n), got.token]
    np.testing.assert_allclose(got.raw_logprob, raw, rtol=1e-5)


def test_unusable_rows_are_flagged_and_leave_their_neighbours_alone():
    logits, rows = mixed_batch(8, 64)
    broken = np.array(logits)
    broken[1, 5], broken[3, 0], broken[6] = np.nan, np.inf, -np.inf
    broken[4, 2] = -np.inf
    want, got = draw(logits, rows), draw(jnp.asarray(broken), rows)
    assert np.flatnonzero(got.bad).tolist() == [1, 3, 6]
    good = [0, 2, 5, 7]
    np.testing.assert_array_equal(got.token[jnp.array(good)], want.token[jnp.array(good)])
    assert got.token.tolist()[1] == got.token.tolist()[3] == got.token.tolist()[6] == 0
    assert not np.isnan(got.raw_logprob).any() and not np.isnan(got.processed_logprob).any()


def test_a_row_whose_mask_allows_nothing_is_bad():
    got = draw(jnp.zeros((2, 4)), rows_of(2), jnp.array([[False] * 4, [True] * 4]))
    assert got.bad.tolist() == [True, False]


def test_top_logprobs_are_the_likeliest_with_ties_by_lowest_id():
    logits = jnp.asarray(np.array([[1, 3, 3, 0, 3], [-np.inf, 0, 1, 0, -np.inf]], np.float32))
    ids, values = top_logprobs(raw_logprobs(logits), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [2, 1, 3, 0]]
    want = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(values[0], want[0, jnp.array([1, 2, 4, 0])], rtol=1e-6)
    assert values[1, 3] == -np.inf
