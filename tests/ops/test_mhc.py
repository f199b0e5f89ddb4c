import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.ops import mhc


def test_split_equals_the_reference(golden):
    g = np.load(golden / "formats.npz")
    pre, post, comb = mhc.split(
        jnp.asarray(g["sinkhorn_mixes"]),
        jnp.asarray(g["sinkhorn_base"]),
        jnp.asarray(g["sinkhorn_scale"]),
        streams=4,
        iters=20,
        eps=1e-6,
    )
    for made, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        np.testing.assert_allclose(made, g[f"sinkhorn_{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernel", mhc.KERNELS, ids=lambda k: k.name)
def test_comb_moves_mass_without_making_any(kernel):
    streams = jax.random.normal(jax.random.key(0), (7, 4, 32))
    fn = jax.random.normal(jax.random.key(1), (24, 128)) * 0.05
    _, post, comb = kernel(streams, fn, jnp.zeros(24), jnp.ones(3), iters=20, eps=1e-6)
    np.testing.assert_allclose(comb.sum(1), np.ones((7, 4)), atol=1e-4)
    np.testing.assert_allclose(comb.sum(2), np.ones((7, 4)), atol=1e-3)
    assert comb.min() > 0 and post.max() < 2
