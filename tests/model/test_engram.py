import dataclasses
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_network import load
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cache import BACKTRACK
from deepinfer_jax.model.engram import engram_rows, hash_on_device, look_back
from deepinfer_jax.model.engram_hash import engram_hash, hash_rows
from deepinfer_jax.runner.step import pack_rows
from deepinfer_jax.settings import package_folder

ROWS = 16
PAD = 2


@pytest.fixture(scope="module")
def arrays(golden):
    return load(golden / "engram.npz")


@pytest.fixture(scope="module")
def tiny(golden):
    return ModelConfig.from_file(golden)


@pytest.fixture(scope="module")
def release():
    text = (package_folder("configs") / "v41_flash.toml").read_text()
    return ModelConfig.from_dict(tomllib.loads(text)["model"])


@pytest.mark.parametrize("name", ["tiny", "release"])
def test_hash_constants_equal_the_reference(name, tiny, release, arrays):
    config = tiny if name == "tiny" else release
    made = engram_hash(config)
    primes = arrays[f"{name}_primes"]
    np.testing.assert_array_equal(made.primes, primes.reshape(primes.shape[0], -1))
    np.testing.assert_array_equal(made.offsets, arrays[f"{name}_offsets"])
    np.testing.assert_array_equal(made.multipliers, arrays[f"{name}_multipliers"])
    assert made.num_embeddings == config.engram_num_embeddings


def test_the_release_has_48_different_primes_from_16_million_on(release, arrays):
    primes = engram_hash(release).primes.reshape(-1).tolist()
    assert len(set(primes)) == len(primes) == 48
    assert min(primes) >= release.engram_vocab_size and max(primes) < 2**24
    small = np.arange(2, 4102)
    assert all((prime % small).all() for prime in primes)
    assert tuple(arrays["release_num_embeddings"]) == release.engram_num_embeddings


def test_the_rows_of_the_release_equal_the_reference_on_both_sides(release, arrays):
    constants, pad = engram_hash(release), int(arrays["release_pad_compressed"])
    ids = arrays["release_compressed_ids"]
    assert (ids < 0).any()
    np.testing.assert_array_equal(hash_rows(constants, ids, pad), arrays["release_hash"])
    made = hash_on_device(jnp.asarray(grams(ids, pad, 4), jnp.int32), constants)
    np.testing.assert_array_equal(made, arrays["release_hash"])


def grams(ids, pad, order):
    """n-gram ids [t, order] by definition: the pad from the first blocked position on."""
    out = np.full((len(ids), order), pad)
    for t in range(len(ids)):
        for step in range(order):
            if t - step < 0 or ids[t - step] < 0:
                break
            out[t, step] = ids[t - step]
    return out


@pytest.fixture(scope="module")
def release_hash(release):
    constants = engram_hash(release)
    return constants, jax.jit(lambda ids: hash_on_device(ids, constants))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_device_hash_is_the_host_hash_on_any_ids(release, release_hash, data):
    config, (constants, on_device) = release, release_hash
    top = config.engram_compressed_vocab_size - 1
    token = st.one_of(st.sampled_from([-1, 0, 1, top]), st.integers(-1, top))
    ids = np.asarray(data.draw(st.lists(token, min_size=12, max_size=12)))
    made = on_device(jnp.asarray(grams(ids, PAD, 4), jnp.int32))
    np.testing.assert_array_equal(made, hash_rows(constants, ids, PAD))
    assert int(made.min()) >= 0
    assert (np.asarray(made).max((0, 2)) < config.engram_num_embeddings).all()


def test_a_table_that_32_bits_cannot_hash_is_refused(tiny):
    constants = engram_hash(dataclasses.replace(tiny, engram_vocab_size=2**24 - 50))
    with pytest.raises(ConfigError) as caught:
        hash_on_device(jnp.zeros((1, 4), jnp.int32), constants)
    assert f"An Engram table has {constants.primes.max()} rows; the device hash" in str(
        caught.value
    )


def empty_history(config, slots):
    return jnp.full((slots, config.engram_max_ngram_size - 1 + BACKTRACK), -1, jnp.int32)


@pytest.fixture(scope="module")
def tiny_rows(tiny, arrays):
    token_map = jnp.asarray(arrays["tiny_token_map"])
    return token_map, jax.jit(lambda rows, history: engram_rows(rows, token_map, history, tiny))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_never_depend_on_where_the_chunks_of_a_prompt_end(tiny, tiny_rows, data):
    config, (token_map, rows_of) = tiny, tiny_rows
    image, pad = config.image_token_id, int(token_map[config.engram_pad_token_id])
    token = st.one_of(st.just(image), st.integers(0, 511))
    ids = np.asarray(data.draw(st.lists(token, min_size=30, max_size=30)), np.int32)
    compressed = np.where(ids == image, -1, np.asarray(token_map)[ids])
    expected = hash_rows(engram_hash(config), compressed, pad)
    history, made, begin = empty_history(config, 3), [], 0
    while begin < len(ids):
        end = min(begin + data.draw(st.integers(1, ROWS)), len(ids))
        found, history = rows_of(pack_rows([(ids[begin:end], begin, 2)], ROWS), history)
        made.append(np.asarray(found)[: end - begin])
        begin = end
    np.testing.assert_array_equal(np.concatenate(made), expected)
    assert (np.asarray(history)[:2] == -1).all(), "another slot's history was written"


def test_slots_of_one_step_do_not_see_each_other_and_padding_writes_nothing(golden, tiny):
    token_map = jnp.arange(512, dtype=jnp.int32)
    parts = [(np.array([11, 12, 13]), 0, 1), (np.array([21, 22]), 0, 0)]
    rows = jax.tree.map(jnp.asarray, pack_rows(parts, 8))
    ids, history = look_back(rows, token_map, empty_history(tiny, 2), tiny)
    pad = tiny.engram_pad_token_id
    np.testing.assert_array_equal(
        ids[:5],
        [
            [11, pad, pad, pad],
            [12, 11, pad, pad],
            [13, 12, 11, pad],
            [21, pad, pad, pad],
            [22, 21, pad, pad],
        ],
    )
    assert np.asarray(history)[0].tolist() == [21, 22] + [-1] * 7
    assert np.asarray(history)[1].tolist() == [11, 12, 13] + [-1] * 6
