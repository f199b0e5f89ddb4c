import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.ops import index_scores, topk
from deepinfer_jax.ops.quant import decode_fp4, encode_fp4


def paged(slots, m, page):
    """Keys of `slots` sequences of m entries in shuffled pages, their table, and whole [s, m, 8].

    Page 0 and one page that nobody owns hold NaN.
    """
    whole = np.random.default_rng(2).standard_normal((slots, m, 8)).astype(np.float32)
    per_slot = m // page
    order = 1 + np.random.default_rng(3).permutation(slots * per_slot + 1)
    table = order[:-1].reshape(slots, per_slot).astype(np.int32)
    keys = np.full((slots * per_slot + 2, page, 8), np.nan, np.float32)
    keys[table] = whole.reshape(slots, per_slot, page, 8)
    return jnp.asarray(keys), jnp.asarray(table), whole


@pytest.mark.parametrize("kernel", index_scores.KERNELS, ids=lambda k: k.name)
def test_scores_equal_the_definition(kernel):
    q = jax.random.normal(jax.random.key(0), (6, 4, 8))
    w = jax.random.normal(jax.random.key(1), (6, 4))
    keys, table, whole = paged(3, 10, 5)
    slot = jnp.asarray([0, 2, 2, 1, 0, 1], jnp.int32)
    visible = jnp.full(6, 10, jnp.int32)
    made = kernel(q, w, keys, table, slot, visible)
    dots = np.maximum(np.einsum("nhk,nmk->nhm", q, whole[np.asarray(slot)]), 0)
    np.testing.assert_allclose(made, np.einsum("nhm,nh->nm", dots, w), atol=1e-5)


def by_definition(scores, k):
    rows = []
    for row in scores:
        order = sorted((j for j in range(len(row)) if row[j] > -np.inf), key=lambda j: (-row[j], j))
        chosen = sorted(order[:k])
        rows.append(chosen + [-1] * (k - len(chosen)))
    return rows


@pytest.mark.parametrize("kernel", topk.KERNELS, ids=lambda k: k.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ties_go_to_the_lower_column_and_the_rest_is_minus_one(kernel, data):
    # Few distinct values, both zeros and -inf among them, so that every kind of tie occurs.
    value = st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, 2.0])
    row = st.lists(value, min_size=12, max_size=12)
    scores = np.asarray(data.draw(st.lists(row, min_size=3, max_size=3)), np.float32)
    k = data.draw(st.sampled_from([1, 5, 12, 16]))
    np.testing.assert_array_equal(kernel(jnp.asarray(scores), k=k), by_definition(scores, k))


@pytest.mark.parametrize("slots", [[0] * 70, [0] * 40 + [2] * 30, [0, 1, 2] * 24])
def test_tiles_of_a_prompt_or_of_many_sequences_score_what_the_reference_scores(slots):
    n, m = len(slots), 1100  # more than one tile, and blocks of which the last is not full
    q = jax.random.normal(jax.random.key(0), (n, 4, 8))
    w = jax.random.normal(jax.random.key(1), (n, 4))
    keys, table, _ = paged(3, m, 50)
    slot = jnp.asarray(slots, jnp.int32)
    visible = jax.random.randint(jax.random.key(3), (n,), 0, m + 1)
    expected = np.asarray(index_scores.gathered(q, w, keys, table, slot, visible))
    seen = np.arange(m) < np.asarray(visible)[:, None]
    for kernel in (index_scores.tiles, index_scores.rows):
        made = np.asarray(jax.jit(kernel)(q, w, keys, table, slot, visible))
        np.testing.assert_allclose(made[seen], expected[seen], atol=1e-5)


@pytest.mark.parametrize("kernel", index_scores.KERNELS, ids=lambda k: k.name)
def test_records_score_the_bits_of_their_values(kernel):
    n, m, k = 40, 1024, 32
    q, w = (
        jax.random.normal(jax.random.key(0), (n, 4, k)),
        jax.random.normal(jax.random.key(1), (n, 4)),
    )
    records = encode_fp4(jax.random.normal(jax.random.key(2), (3 * m // 64 + 1, 64, k)))
    table = 1 + jnp.arange(3 * m // 64, dtype=jnp.int32).reshape(3, -1)
    slot = jnp.asarray([0] * 33 + [1, 2, 1, 0, 2, 2, 1], jnp.int32)
    visible = jnp.full(n, m, jnp.int32)
    quick = {"xla_backend_optimization_level": 0}  # compiling is what this test waits for
    run = jax.jit(kernel.run, static_argnames="decode", compiler_options=quick)
    made = run(q, w, records, table, slot, visible, decode=decode_fp4)
    values = decode_fp4(records, q.dtype)
    assert_same_bits(made, run(q, w, values, table, slot, visible))
