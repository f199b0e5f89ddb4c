import math
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
from golden_network import load

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.arithmetic import ARITHMETICS, arithmetic
from deepinfer_jax.model.layers import inverse_frequencies, rms_norm, rope_table, rotate
from deepinfer_jax.settings import package_folder


def release():
    text = (package_folder("configs") / "v41_flash.toml").read_text()
    return ModelConfig.from_dict(tomllib.loads(text)["model"])


@pytest.fixture(scope="module")
def tiny(golden):
    return ModelConfig.from_file(golden)


@pytest.mark.parametrize("name", ["tiny", "release"])
@pytest.mark.parametrize(("kind", "compressed"), [("plain", False), ("yarn", True)])
def test_inverse_frequencies_equal_the_reference_within_two_units(
    golden, tiny, name, kind, compressed
):
    expected = load(golden / "rope.npz")[f"{name}_{kind}_inv_freq"]
    made = inverse_frequencies(tiny if name == "tiny" else release(), compressed=compressed)
    assert made.dtype == np.float32 and made.shape == expected.shape
    np.testing.assert_array_max_ulp(made, expected, maxulp=2)


def test_a_rope_table_takes_cos_and_sin_of_the_angle_that_float32_holds(tiny):
    table = rope_table(tiny, 700, compressed=False)
    assert table.shape == (700, 2, 8) and table.dtype == np.float32
    np.testing.assert_array_equal(table[0], [[1] * 8, [0] * 8])
    angle = np.float32(699) * inverse_frequencies(tiny, compressed=False)[3]
    assert angle.dtype == np.float32
    assert table[699, 0, 3] == np.float32(math.cos(angle))
    assert table[699, 1, 3] == np.float32(math.sin(angle))


def test_rotation_turns_adjacent_pairs_of_the_last_channels_and_back(tiny):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3, 24)).astype(np.float32)
    angles = rope_table(tiny, 9, compressed=True)[[0, 1, 4, 7, 8]]
    turned = np.asarray(rotate(jnp.asarray(x), jnp.asarray(angles)))
    np.testing.assert_array_equal(turned[..., :8], x[..., :8])
    np.testing.assert_array_equal(turned[0], x[0])
    pair = x[2, 1, 8] + 1j * x[2, 1, 9]
    expected = pair * (angles[2, 0, 0] + 1j * angles[2, 1, 0])
    np.testing.assert_allclose(turned[2, 1, 8:10], [expected.real, expected.imag], rtol=1e-5)
    back = rotate(jnp.asarray(turned), jnp.asarray(angles), inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)


def test_rms_norm_is_float32_inside_and_keeps_the_type():
    x = jnp.asarray([[3.0, 4.0], [300.0, 400.0]], jnp.bfloat16)
    out = rms_norm(x, jnp.ones(2), 1e-20)
    assert out.dtype == jnp.bfloat16
    expected = np.tile(np.array([3.0, 4.0]) / math.sqrt(12.5), (2, 1))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8)


def test_an_unknown_arithmetic_is_refused_with_the_legal_ones():
    with pytest.raises(ConfigError) as caught:
        arithmetic("fp16")
    assert str(caught.value) == (
        "There is no arithmetic named 'fp16'. "
        f"The arithmetics are {', '.join(ARITHMETICS)}. Choose one of them."
    )


@pytest.mark.parametrize("cache_format", ["bf16", "release", "fp16"])
def test_caches_that_would_round_unrounded_keys_are_refused(cache_format):
    with pytest.raises(ConfigError) as caught:
        arithmetic("f32", cache_format)
    assert str(caught.value) == (
        f"engine.cache_format is {cache_format!r} with the arithmetic f32. "
        "A cache holds what the arithmetic defines to the last bit; with f32 the formats that do "
        "are: f32. Set engine.cache_format to one of them or leave it out, or choose an "
        "arithmetic that rounds its keys (f32qdq, release)."
    )


def test_caches_follow_the_arithmetic_unless_they_are_named():
    found = {name: chosen.caches.name for name, chosen in ARITHMETICS.items()}
    assert found == {
        "f32": "f32",
        "f32qdq": "f32",
        "release": "release",
        "release_traced": "release",
    }
    for name in ("f32qdq", "release"):
        for cache_format in ("f32", "bf16", "release"):
            assert arithmetic(name, cache_format).caches.name == cache_format
