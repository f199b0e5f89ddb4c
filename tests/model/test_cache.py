import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.attention import window_keys
from deepinfer_jax.model.cache import BACKTRACK, PAGE, init_cache, kv_bytes_per_token, record_bytes
from deepinfer_jax.ops.quant import numbers
from deepinfer_jax.runner.step import pack_rows

WINDOW, ROWS, SLOTS, WIDTH = 5, 24, 2, 2
SIZE = WINDOW + BACKTRACK


def test_caches_have_the_shapes_that_the_config_gives(golden):
    config = ModelConfig.from_file(golden)
    cache = init_cache(config, arithmetic("release", "bf16"), slots=3, positions=200)
    assert cache.window.shape == (10, 3, 16 + 6, 64)
    # Two pages of 128 positions a slot, and page 0.
    assert [s.entries.shape for s in cache.sources] == [(7, 64, 64), (7, 64, 64), (7, 128, 64)]
    assert np.asarray(cache.table).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [s.index_keys.shape[-1] for s in cache.sources] == [32] * 3
    shapes = [None if s.raw is None else s.raw.shape for s in cache.sources]
    assert shapes == [(3, 8, 128), (3, 8, 128), None]
    assert cache.history.shape == (3, 9) and (np.asarray(cache.history) == -1).all()
    assert cache.window.dtype == jnp.bfloat16 and cache.sources[0].raw.dtype == jnp.float32


@pytest.mark.parametrize("name", ["f32", "bf16", "release"])
def test_the_bytes_of_a_key_are_those_of_its_place_in_the_cache(golden, name):
    config = ModelConfig.from_file(golden)
    chosen = arithmetic("f32qdq", name)
    caches = chosen.caches
    cache = init_cache(config, chosen, slots=3, positions=200)
    kinds = [(caches.window, cache.window, config.head_dim)]
    for source in cache.sources:
        kinds.append((caches.entry, source.entries, config.head_dim))
        kinds.append((caches.index_key, source.index_keys, config.index_head_dim))
    for kind, held, k in kinds:
        stored = jax.eval_shape(kind.encode, jnp.zeros((5, k), chosen.dtype))
        assert (stored.shape, stored.dtype) == ((5, held.shape[-1]), held.dtype)
    pages = sum(s.entries.nbytes + s.index_keys.nbytes for s in cache.sources)
    assert pages == 7 * PAGE * kv_bytes_per_token(config, caches)
    assert record_bytes(config, caches)["window"] == cache.window[0, 0, 0].nbytes


def test_rows_of_a_step_find_each_other_and_padding_finds_nothing():
    parts = [(np.array([7, 8, 9]), 4, 1), (np.array([5]), 0, 0)]
    rows = jax.tree.map(jnp.asarray, pack_rows(parts, 6))
    assert np.asarray(rows.valid).tolist() == [True] * 4 + [False] * 2
    position, in_step, row = rows.back(jnp.arange(3, dtype=jnp.int32))
    assert np.asarray(position)[:4].tolist() == [[4, 3, 2], [5, 4, 3], [6, 5, 4], [0, -1, -2]]
    assert np.asarray(in_step).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
        [True, False, False],
        [False] * 3,
        [False] * 3,
    ]
    assert np.asarray(row)[2].tolist() == [2, 1, 0]


def test_a_ring_keeps_the_last_rows_of_a_chunk_that_is_longer():
    rows = jax.tree.map(jnp.asarray, pack_rows([(np.arange(9), 3, 1)], 12))
    kept = np.asarray(rows.writable(4)) == 1
    assert kept.tolist() == [False] * 5 + [True] * 4 + [False] * 3


@jax.jit
def run(values, ring, rows):
    """Every row's window keys and their visibility, and the ring with the rows written."""
    keys = window_keys(values, ring, rows, WINDOW, decode=numbers)
    ring = ring.at[rows.writable(SIZE), rows.position % SIZE].set(values, mode="drop")
    return keys.pool[keys.at], keys.visible, ring


def step(kv, begins, ends, ring):
    """One chunk of every slot: the visible keys by (slot, position), and the new ring."""
    spans = enumerate(zip(begins, ends, strict=True))
    parts = [(np.zeros(e - b, np.int32), b, slot) for slot, (b, e) in spans if e > b]
    rows = pack_rows(parts, ROWS)
    slot, position = np.asarray(rows.slot), np.asarray(rows.position)
    values = np.where(position[:, None] >= 0, kv[slot, position], 0)
    keys, visible, ring = run(values, ring, rows)
    keys, visible = np.asarray(keys), np.asarray(visible)
    at = zip(slot.tolist(), position.tolist(), strict=True)
    return {key: keys[i][visible[i]] for i, key in enumerate(at) if key[1] >= 0}, ring


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 21), st.integers(0, 3)), max_size=8))
def test_a_row_sees_its_window_however_the_prompts_are_cut(sizes):
    kv = np.random.default_rng(0).standard_normal((SLOTS, 200, WIDTH)).astype(np.float32)
    ring, begins = jnp.full((SLOTS, SIZE, WIDTH), np.nan), [0, 0]
    for chunk in sizes:
        ends = [b + s for b, s in zip(begins, chunk, strict=True)]
        seen, ring = step(kv, begins, ends, ring)
        assert len(seen) == sum(chunk)
        for (slot, position), keys in seen.items():
            expected = kv[slot, max(0, position - WINDOW + 1) : position + 1][::-1]
            np.testing.assert_array_equal(keys, expected, err_msg=f"{slot} {position}")
        begins = ends


@settings(max_examples=25, deadline=None)
@given(begin=st.integers(1, 20), extra=st.integers(1, BACKTRACK))
def test_rows_that_are_undone_leave_the_window_of_the_rest_whole(begin, extra):
    kv = np.random.default_rng(0).standard_normal((SLOTS, 40, WIDTH)).astype(np.float32)
    wrong = kv + 100
    _, ring = step(kv, [0, 0], [begin, 0], jnp.full((SLOTS, SIZE, WIDTH), np.nan))
    _, ring = step(wrong, [begin, 0], [begin + extra, 0], ring)
    seen, _ = step(kv, [begin, 0], [begin + 1, 0], ring)
    expected = kv[0, max(0, begin - WINDOW + 1) : begin + 1][::-1]
    np.testing.assert_array_equal(seen[0, begin], expected)
