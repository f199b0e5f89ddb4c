import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import quant


@pytest.fixture(scope="module")
def formats(golden):
    return np.load(golden / "formats.npz")


CASES = [
    (quant.qdq_fp8, "fp8_dequant"),
    (quant.qdq_fp4, "fp4_e8m0_dequant"),
    (quant.qdq_fp4_e4m3, "fp4_e4m3_dequant"),
]


@pytest.mark.parametrize(("function", "name"), CASES, ids=lambda c: getattr(c, "__name__", c))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_equals_the_reference_exactly(formats, function, name, dtype):
    x = jnp.asarray(formats["x_bf16_as_f32"]).astype(dtype)
    made = jax.jit(function)(x)
    assert made.dtype == dtype
    np.testing.assert_array_equal(np.asarray(made, np.float32), formats[name])


def test_fp8_codes_and_scales_equal_the_reference(formats):
    codes, exponent = quant.quantize_fp8(jnp.asarray(formats["x_bf16_as_f32"]))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), formats["fp8_codes"])
    np.testing.assert_array_equal(exponent, formats["fp8_scale_e8m0"])


@pytest.mark.parametrize("function", [quant.qdq_fp8, quant.qdq_fp4], ids=lambda f: f.__name__)
def test_rounding_twice_is_rounding_once(function):
    x = jax.random.normal(jax.random.key(3), (64, 128)) * jnp.exp2(
        jax.random.randint(jax.random.key(4), (64, 1), -20, 8).astype(jnp.float32)
    )
    once = function(x)
    np.testing.assert_array_equal(function(once), once)


@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)]
)
def test_fp4_ties_go_to_the_even_code(tie, even):
    # The 6 fixes the scale at one.
    x = jnp.zeros(32).at[0].set(6.0).at[1].set(tie).at[2].set(-tie)
    np.testing.assert_array_equal(quant.qdq_fp4(x)[:3], [6, even, -even])


def test_zero_stays_zero():
    for function, _ in CASES:
        np.testing.assert_array_equal(function(jnp.zeros((2, 64))), jnp.zeros((2, 64)))
