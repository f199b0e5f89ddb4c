import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.hyper_connections import collapse, write_back


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def same(ours, formula, arguments, g):
    value, pull = jax.vjp(ours, *arguments)
    expected, pull_formula = jax.vjp(formula, *arguments)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    for a, b in zip(pull(g), pull_formula(g), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_write_back_goes_from_source_streams_to_target_streams():
    def formula(x, y, post, comb):
        return jnp.einsum("btij,btid->btjd", comb, x) + post[..., None] * y[:, :, None]

    arguments = normal(2, 3, 4, 8), normal(2, 3, 8, seed=1), normal(2, 3, 4, seed=2)
    same(write_back, formula, (*arguments, normal(2, 3, 4, 4, seed=3)), normal(2, 3, 4, 8, seed=4))


def test_the_collapse_weighs_the_streams():
    def formula(x, pre):
        return jnp.einsum("bti,btid->btd", pre, x)

    same(collapse, formula, (normal(2, 3, 4, 8), normal(2, 3, 4, seed=1)), normal(2, 3, 8, seed=2))
