import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.linear import project, rms_norm


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_the_norm_and_its_gradient_equal_the_formula():
    x, w, g = normal(2, 5, 16), normal(16, seed=1), normal(2, 5, 16, seed=2)

    def formula(x, w):
        return w * x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-20)

    y, pull = jax.vjp(lambda x, w: rms_norm(x, w, 1e-20), x, w)
    expected, pull_formula = jax.vjp(formula, x, w)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    for a, b in zip(pull(g), pull_formula(g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_an_exact_product_sees_the_float32_weight_through_bfloat16_operands():
    x, w = normal(64, 256).astype(jnp.bfloat16), normal(24, 256, seed=1)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    coarse = np.abs(np.asarray(project(x, w, jnp.float32, False)) - expected).max()
    exact = np.abs(np.asarray(project(x, w, jnp.float32, True)) - expected).max()
    assert exact < 1e-3 < coarse


def test_weight_gradients_are_float32_and_sum_over_all_rows():
    x, w, g = normal(3, 7, 8), normal(4, 8, seed=1), normal(3, 7, 4, seed=2)
    dx, dw = jax.vjp(lambda x, w: project(x, w, jnp.float32, False), x, w)[1](g)
    np.testing.assert_allclose(dx, np.asarray(g) @ np.asarray(w), atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("abo,abi->oi", g, x), atol=1e-5)
    assert dw.dtype == jnp.float32
