import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram_hash import engram_hash, hash_rows
from deepinfer_jax.training.engram import signed_root, table_rows


def test_the_device_hash_equals_the_host_hash_of_each_segment_alone(golden):
    config = ModelConfig.from_file(golden / "config.json")
    token_map = np.load(golden / "training_forward.npz")["token_map"]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, (2, 50)).astype(np.int32)
    segments = np.repeat([[1, 2, 3], [1, 0, 2]], [20, 3, 27], axis=1).astype(np.int32)
    found = table_rows(token_map, jnp.asarray(ids), jnp.asarray(segments), config)
    pad = int(token_map[config.engram_pad_token_id])
    for row in range(2):
        for low, high in ((0, 20), (20, 23), (23, 50)):
            alone = hash_rows(engram_hash(config), token_map[ids[row, low:high]], pad)
            np.testing.assert_array_equal(np.asarray(found)[row, low:high], alone)


def test_the_device_hash_is_the_golden_one(golden):
    config = ModelConfig.from_file(golden / "config.json")
    data = np.load(golden / "training_forward.npz")
    ids = jnp.asarray(data["p300_ids"][None])
    found = table_rows(data["token_map"], ids, jnp.ones_like(ids), config)
    np.testing.assert_array_equal(np.asarray(found)[0], data["p300_hash"])


def test_the_root_is_exact_and_its_slope_is_bounded():
    dots = jnp.asarray([-4.0, -1e-9, 1e-9, 1e-4, 0.25, 4.0])
    expected = np.sign(dots) * np.sqrt(np.maximum(np.abs(dots), 1e-6))
    np.testing.assert_allclose(signed_root(dots), expected, rtol=1e-6)
    slopes = np.asarray(jax.vmap(jax.grad(signed_root))(dots))
    assert slopes.max() <= 5.0 + 1e-5
    np.testing.assert_allclose(slopes[[0, 4, 5]], [0.25, 1.0, 0.25], rtol=1e-6)
