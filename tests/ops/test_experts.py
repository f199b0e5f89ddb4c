import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import experts, linear
from deepinfer_jax.ops.experts import ExpertWeights

E, F, D = 6, 8, 32


def weights(seed=0):
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    return ExpertWeights(
        w1=jax.random.normal(a, (E, F, D)),
        w3=jax.random.normal(b, (E, F, D)),
        w2=jax.random.normal(c, (E, D, F)),
    )


def reference(x, w, ids, gates, limit):
    out = np.zeros(x.shape)
    for n, row in enumerate(np.asarray(x, np.float64)):
        for e, gate in zip(np.asarray(ids[n]), np.asarray(gates[n]), strict=True):
            g = np.minimum(np.asarray(w.w1[e], np.float64) @ row, limit)
            u = np.clip(np.asarray(w.w3[e], np.float64) @ row, -limit, limit)
            out[n] += np.asarray(w.w2[e], np.float64) @ (gate * g / (1 + np.exp(-g)) * u)
    return out


def run(kernel, x, w, ids, gates):
    return kernel(x, w, ids, gates, linear=linear.xla, limit=3.0, quantize=False)


@pytest.mark.parametrize("kernel", experts.KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("n", [1, 2, 17, 64])
def test_equals_the_definition_with_both_clamps(kernel, n):
    x = jax.random.normal(jax.random.key(n), (n, D))
    order = jax.vmap(lambda k: jax.random.permutation(k, E))(jax.random.split(jax.random.key(1), n))
    ids, gates = order[:, :3].astype(jnp.int32), jax.random.uniform(jax.random.key(2), (n, 3))
    w = weights()
    made = jax.jit(lambda *a: run(kernel, *a))(x, w, ids, gates)
    np.testing.assert_allclose(made, reference(x, w, ids, gates, 3.0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kernel", experts.KERNELS, ids=lambda k: k.name)
def test_no_row_is_dropped_when_all_choose_one_expert(kernel):
    n = 50
    x = jax.random.normal(jax.random.key(0), (n, D))
    ids = jnp.tile(jnp.asarray([[4, 0]], jnp.int32), (n, 1))
    gates = jnp.full((n, 2), 0.5)
    w = weights(3)
    np.testing.assert_allclose(
        run(kernel, x, w, ids, gates), reference(x, w, ids, gates, 3.0), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("kernel", experts.KERNELS, ids=lambda k: k.name)
def test_a_row_that_is_not_finite_stays_alone(kernel):
    x = np.array(jax.random.normal(jax.random.key(5), (9, D)))
    ids = jnp.asarray([[i % 3, 3 + i % 2] for i in range(9)], jnp.int32)
    gates, w = jnp.full((9, 2), 0.5), weights(4)
    x[4] = np.nan
    made = np.asarray(run(kernel, jnp.asarray(x), w, ids, gates))
    rest = np.arange(9) != 4
    expected = reference(x[rest], w, ids[rest], gates[rest], 3.0)
    np.testing.assert_allclose(made[rest], expected, rtol=1e-4, atol=1e-3)
    assert np.isnan(made[4]).all()
