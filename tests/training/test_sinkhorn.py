import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops.mhc import sinkhorn
from deepinfer_jax.training.sinkhorn import sinkhorn_kernel


@pytest.fixture
def logits():
    return jnp.asarray(np.random.default_rng(0).normal(0, 4, (200, 4, 4)), jnp.float32)


def test_the_kernel_and_the_models_loop_agree_in_value_and_gradient(logits):
    g = jnp.asarray(np.random.default_rng(1).normal(size=logits.shape), jnp.float32)
    plain, pull_plain = jax.vjp(lambda c: sinkhorn(c, iters=20, eps=1e-6), logits)
    kernel, pull_kernel = jax.vjp(lambda c: sinkhorn_kernel(c, 20, 1e-6, True), logits)
    np.testing.assert_allclose(kernel, plain, atol=1e-6)
    np.testing.assert_allclose(pull_kernel(g)[0], pull_plain(g)[0], atol=1e-6)


def test_the_mixing_matrix_is_the_golden_one(golden):
    data = np.load(golden / "formats.npz")
    mixes = data["sinkhorn_mixes"][:, 8:] * data["sinkhorn_scale"][2] + data["sinkhorn_base"][8:]
    comb = sinkhorn_kernel(jnp.asarray(mixes.reshape(-1, 4, 4)), 20, 1e-6, True)
    np.testing.assert_allclose(comb, data["sinkhorn_comb"], atol=1e-6)


def test_the_gradient_is_that_of_a_finite_difference_where_the_iteration_has_not_converged():
    c = np.zeros((1, 4, 4), np.float32)
    c[0, 0, 1], c[0, 1, 1], c[0, 2, 3] = 9, 8, 7

    def loss(c):
        return jnp.sum(sinkhorn(c, iters=3, eps=1e-6)[:, 1] * jnp.arange(4, dtype=jnp.float32))

    slope = jax.grad(loss)(jnp.asarray(c))[0, 1, 1]
    step = np.zeros_like(c)
    step[0, 1, 1] = 1e-2
    difference = (loss(jnp.asarray(c + step)) - loss(jnp.asarray(c - step))) / 2e-2
    np.testing.assert_allclose(slope, difference, rtol=2e-2)
    assert abs(float(slope)) > 1e-3
