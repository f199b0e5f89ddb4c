import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.experts import moe, route
from deepinfer_jax.training.parameters import initial_values
from deepinfer_jax.training.smoke import smoke_config


def test_the_bias_selects_but_does_not_weigh_and_ties_go_to_the_lower_index():
    config = smoke_config()
    gate = np.zeros((4, 32), np.float32)
    x = jnp.ones((1, 2, 32))
    bias = jnp.asarray([0.0, 1.0, 0.0, 0.0])
    weights, selected = route(x, jnp.asarray(gate), bias, config)
    assert np.asarray(selected)[0, 0].tolist() == [True, True, False, False]
    half = config.routed_scaling_factor / 2
    np.testing.assert_allclose(np.asarray(weights)[0, 1], [half, half, 0, 0], rtol=1e-6)


def test_the_dense_mixture_equals_the_selected_experts_one_by_one():
    config = smoke_config()
    values = initial_values(config, 0)
    prefix = "layers.0.ffn"
    x = np.random.default_rng(1).normal(size=(1, 6, 32)).astype(np.float32)
    y, selected = moe(
        jnp.asarray(x), {k: jnp.asarray(v) for k, v in values.items()}, prefix, config
    )

    def expert(x, w1, w3, w2, weight):
        g, u = np.minimum(x @ w1.T, 10), np.clip(x @ w3.T, -10, 10)
        return (weight * g / (1 + np.exp(-g)) * u) @ w2.T

    scores = np.sqrt(np.log1p(np.exp(x[0] @ values[f"{prefix}.gate.weight"].T)))
    for t in range(6):
        best = np.argsort(-scores[t])[:2]
        share = 1.5 * scores[t] / scores[t][best].sum()
        w1, w2, w3 = (values[f"{prefix}.experts.w{i}.weight"] for i in (1, 2, 3))
        expected = sum(expert(x[0, t], w1[e], w3[e], w2[e], share[e]) for e in best)
        s1, s2, s3 = (values[f"{prefix}.shared_experts.w{i}.weight"] for i in (1, 2, 3))
        expected = expected + expert(x[0, t], s1, s3, s2, 1.0)
        np.testing.assert_allclose(np.asarray(y)[0, t], expected, atol=1e-5)
        assert set(np.flatnonzero(np.asarray(selected)[0, t])) == set(best)
