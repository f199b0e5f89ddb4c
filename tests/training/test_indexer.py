import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.indexer import index_loss


def case():
    rng = np.random.default_rng(0)
    visible = rng.random((2, 3, 8)) < 0.6
    visible[0, 0] = False
    mass = np.where(visible, rng.random((2, 3, 8)), 0) / 10
    scores = rng.normal(size=(2, 3, 8))
    return [jnp.asarray(a) for a in (scores.astype(np.float32), visible, mass.astype(np.float32))]


def test_the_loss_is_the_divergence_weighted_by_the_mass():
    scores, visible, mass = case()
    expected = 0.0
    for row in np.ndindex(2, 3):
        seen, target = np.asarray(visible[row]), np.asarray(mass[row])
        if target.sum() == 0:
            continue
        chance = np.where(seen, np.exp(scores[row]), 0)
        chance, share = chance / chance.sum(), target / target.sum()
        terms = share[share > 0] * np.log(share[share > 0] / chance[share > 0])
        expected += target.sum() * terms.sum()
    np.testing.assert_allclose(index_loss((scores,), (visible,), (mass,)), expected, rtol=1e-5)


def test_the_gradient_is_that_of_a_finite_difference():
    scores, visible, mass = case()

    def loss(s):
        return index_loss((s,), (visible,), (mass,))

    slope = np.asarray(jax.grad(loss)(scores))
    place = tuple(np.argwhere(np.asarray(mass) > 0.02)[0])
    step = np.zeros(scores.shape, np.float32)
    step[place] = 1e-2
    difference = (loss(scores + step) - loss(scores - step)) / 2e-2
    np.testing.assert_allclose(slope[place], difference, rtol=2e-2, atol=1e-4)
    assert np.all(slope[~np.asarray(visible)] == 0)


def test_the_loss_is_zero_when_the_scores_explain_the_mass():
    _, visible, mass = case()
    scores = jnp.log(jnp.maximum(mass, 1e-30))
    np.testing.assert_allclose(index_loss((scores,), (visible,), (mass,)), 0.0, atol=1e-6)
