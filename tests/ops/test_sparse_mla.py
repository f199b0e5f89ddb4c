import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops import sparse_mla
from deepinfer_jax.ops.device import KINDS, Device
from deepinfer_jax.ops.quant import decode_fp8, encode_fp8
from deepinfer_jax.ops.sparse_mla import WINDOW_ONLY, Keys
from deepinfer_jax.ops.table import select

N, H, K = 5, 3, 16
TABLE = {"sparse_mla": sparse_mla.KERNELS}
EXACT = [kernel for kernel in sparse_mla.KERNELS if kernel is not WINDOW_ONLY]


def problem(seed):
    key = iter(jax.random.split(jax.random.key(seed), 8))
    q = jax.random.normal(next(key), (N, H, K))

    def keys(pool, chosen):
        return Keys(
            jax.random.normal(next(key), (pool, K)),
            jax.random.randint(next(key), (N, chosen), 0, pool),
            jax.random.bernoulli(next(key), 0.6, (N, chosen)),
        )

    return q, keys(20, 6), keys(40, 9), jax.random.normal(next(key), (H,))


def reference(q, sets, sink, scale):
    out = np.zeros(q.shape)
    for n in range(N):
        rows = np.concatenate(
            [np.asarray(s.pool)[np.asarray(s.at[n])][np.asarray(s.visible[n])] for s in sets]
        ).astype(np.float64)
        for h in range(H):
            weights = np.exp(rows @ np.asarray(q[n, h], np.float64) * scale)
            out[n, h] = weights @ rows / (weights.sum() + np.exp(float(sink[h])))
    return out


@pytest.mark.parametrize("kernel", EXACT, ids=lambda k: k.name)
@pytest.mark.parametrize("seed", range(4))
def test_equals_one_softmax_over_both_sets_and_the_sink(kernel, seed):
    q, window, entries, sink = problem(seed)
    made = kernel(q, window, entries, sink, scale=0.25)
    np.testing.assert_allclose(made, reference(q, [window, entries], sink, 0.25), atol=1e-5)
    made = kernel(q, window, None, sink, scale=0.25)
    np.testing.assert_allclose(made, reference(q, [window], sink, 0.25), atol=1e-5)


@pytest.mark.parametrize("kernel", EXACT, ids=lambda k: k.name)
def test_a_row_without_keys_is_zero_and_hidden_keys_cannot_leak(kernel):
    q, window, entries, sink = problem(9)
    hidden = window.replace(
        visible=jnp.zeros_like(window.visible), pool=jnp.full_like(window.pool, jnp.nan)
    )
    np.testing.assert_array_equal(kernel(q, hidden, None, sink, scale=1.0), np.zeros((N, H, K)))
    made = kernel(q, hidden, entries, sink, scale=0.25)
    np.testing.assert_allclose(made, reference(q, [entries], sink, 0.25), atol=1e-5)


def test_window_only_sees_the_window_and_the_sink_and_no_entry():
    q, window, entries, sink = problem(3)
    made = WINDOW_ONLY(q, window, entries, sink, scale=0.25)
    np.testing.assert_allclose(made, reference(q, [window], sink, 0.25), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_window_only_is_never_chosen_unless_it_is_named(kind, batch_invariant):
    device = Device(kind, kind)
    try:
        chosen = select(device, batch_invariant=batch_invariant, table=TABLE).sparse_mla
    except NoKernelError:
        return
    assert chosen is not WINDOW_ONLY


def test_window_only_is_used_when_it_is_named():
    ops = select(Device("cpu", "cpu"), overrides={"sparse_mla": "window_only"}, table=TABLE)
    assert ops.sparse_mla is WINDOW_ONLY
    assert [(r.kernel, r.why) for r in ops.rows()] == [("window_only", "asked for by name")]


@pytest.mark.parametrize("chunks", [[96], [40, 33, 7], [1] * 45])
def test_tiles_of_neighbouring_rows_equal_the_reference(chunks):
    n, width, pool = sum(chunks), 48, 400
    key = iter(jax.random.split(jax.random.key(1), 8))
    # Each chunk is a prompt of its own: its windows shift by one place from row to row.
    first = np.cumsum([0, *chunks[:-1]])
    last = np.concatenate([s * 3 + 60 + np.arange(c) for s, c in zip(first, chunks, strict=True)])
    at = jnp.asarray(last[:, None] - np.arange(width), jnp.int32)
    rows = np.concatenate([np.arange(c) for c in chunks])
    window = Keys(
        jax.random.normal(next(key), (pool, K)), at, jnp.asarray(np.arange(width) <= rows[:, None])
    )
    entries = Keys(
        jax.random.normal(next(key), (40, K)),
        jax.random.randint(next(key), (n, 9), 0, 40),
        jax.random.bernoulli(next(key), 0.6, (n, 9)),
    )
    q, sink = jax.random.normal(next(key), (n, H, K)), jax.random.normal(next(key), (H,))
    for far in (entries, None):
        expected = sparse_mla.xla(q, window, far, sink, scale=0.25)
        made = jax.jit(lambda *a: sparse_mla.tiles(*a, scale=0.25))(q, window, far, sink)
        np.testing.assert_allclose(made, expected, atol=1e-5)


@pytest.mark.parametrize("kernel", EXACT, ids=lambda k: k.name)
def test_only_gathered_records_are_decoded_and_give_the_bits_of_their_values(kernel):
    # Rows of neighbouring positions, more than a tile, and a pool of many more records than these.
    n, width, pool, k = 40, 33, 5000, 32
    key = iter(jax.random.split(jax.random.key(5), 8))
    at = jnp.asarray(90 + np.arange(n)[:, None] - np.arange(width), jnp.int32)
    visible = jax.random.bernoulli(next(key), 0.8, (n, width))
    decoded = []

    def decode(record, dtype):
        decoded.append(record.size // record.shape[-1])
        return decode_fp8(record, dtype)

    records = encode_fp8(jax.random.normal(next(key), (pool, k)))
    far = (
        jax.random.randint(next(key), (n, 9), 0, pool),
        jax.random.bernoulli(next(key), 0.6, (n, 9)),
    )
    q, sink = jax.random.normal(next(key), (n, H, k)), jax.random.normal(next(key), (H,))
    quick = {"xla_backend_optimization_level": 0}  # compiling is what this test waits for
    run = jax.jit(
        lambda q, near, far: kernel(q, near, far, sink, scale=0.25), compiler_options=quick
    )
    made = run(q, Keys(records, at, visible, decode), Keys(records, *far, decode))
    assert decoded and max(decoded) <= n * width
    values = decode_fp8(records, q.dtype)
    assert_same_bits(made, run(q, Keys(values, at, visible), Keys(values, *far)))
