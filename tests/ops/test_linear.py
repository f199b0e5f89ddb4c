import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import linear
from deepinfer_jax.ops.packed import Packed


@pytest.fixture(scope="module")
def formats(golden):
    return np.load(golden / "formats.npz")


def packed(formats, kind):
    codes = formats[f"w_{kind}"]
    if kind == "fp8":
        codes = codes.view(jnp.float8_e4m3fn)
    return Packed(jnp.asarray(codes), jnp.asarray(formats[f"w_{kind}_scale"]))


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_packed_weights_expand_exactly(formats, kind):
    values = packed(formats, kind).dequantize(jnp.float32)
    np.testing.assert_array_equal(values, formats[f"w_{kind}_dequant"])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_blocks_reproduces_the_published_product_exactly(formats, kind):
    x = jnp.asarray(formats["x_bf16_as_f32"]).astype(jnp.bfloat16)
    y = jax.jit(lambda x, w: linear.blocks(x, w, quantize=True))(x, packed(formats, kind))
    np.testing.assert_array_equal(np.asarray(y, np.float32), formats[f"gemm_{kind}_bf16out"])


@pytest.mark.parametrize("kernel", linear.KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(1, 32, 8), (5, 96, 33), (64, 256, 128)])
def test_every_kernel_matches_float64(kernel, shape):
    n, i, o = shape
    x, w = (jax.random.normal(jax.random.key(k), s) for k, s in ((0, (n, i)), (1, (o, i))))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(jax.jit(kernel)(x, w), expected, rtol=1e-5, atol=1e-4)
