import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.optimizer import groups, learning_rate, start, update
from deepinfer_jax.training.parameters import initial_values
from deepinfer_jax.training.settings import TrainingSettings
from deepinfer_jax.training.smoke import smoke_config

CONFIG = smoke_config()
SETTINGS = TrainingSettings(steps=100, warmup=1, lr=1e-2, weight_decay=0.0)
CALM = jnp.ones((2, 2)), jnp.ones((2, 4))


def begin(step=0):
    return start(initial_values(CONFIG, 0), step)


def gradients(state, scale):
    rng = np.random.default_rng(0)
    return {
        k: jnp.asarray(scale * rng.normal(size=w.shape), jnp.float32)
        for k, w in state.weights.items()
    }


def test_the_first_update_moves_each_weight_by_the_rate_against_its_gradient():
    state = begin()
    g = gradients(state, 1e-3)
    after, report = update(state, g, *CALM, CONFIG, SETTINGS)
    name = "layers.0.attn.wkv.weight"
    moved = np.asarray(after.weights[name] - state.weights[name])
    np.testing.assert_allclose(moved, -1e-2 * np.sign(g[name]), rtol=1e-2)
    mixes = "layers.0.hc_attn_fn"
    moved = np.abs(np.asarray(after.weights[mixes] - state.weights[mixes]))
    np.testing.assert_allclose(moved, 0.3e-2, rtol=2e-2)
    assert int(after.step) == 1
    assert float(report["skipped"]) == 0


@pytest.mark.parametrize("scale", [1e3, np.nan])
def test_an_update_far_above_the_median_or_not_finite_is_skipped(scale):
    state = begin()
    norms = jnp.where(jnp.arange(128) < 40, 1.0, jnp.inf)
    state = dataclasses.replace(state, norms=norms, seen=jnp.asarray(40, jnp.int32))
    after, report = update(state, gradients(state, scale), *CALM, CONFIG, SETTINGS)
    assert float(report["skipped"]) == 1
    for name, value in state.weights.items():
        np.testing.assert_array_equal(after.weights[name], value)
    assert all(bool(jnp.all(m == 0)) for m in after.m.values())
    assert int(after.step) == 1


def test_heads_above_the_cap_have_their_query_rows_shrunk():
    state = begin()
    zero = {k: jnp.zeros_like(w) for k, w in state.weights.items()}
    peak = jnp.asarray([[80.0, 10.0], [20.0, 400.0]])
    after, _ = update(state, zero, peak, CALM[1], CONFIG, SETTINGS)
    for layer, head, factor in ((0, 0, 0.5), (0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.1)):
        name = f"layers.{layer}.attn.wq_b.weight"
        rows = slice(32 * head, 32 * head + 32)
        expected = factor * np.asarray(state.weights[name][rows])
        np.testing.assert_allclose(after.weights[name][rows], expected, rtol=1e-6)


def test_router_biases_move_towards_equal_load_by_their_sign():
    state = begin()
    zero = {k: jnp.zeros_like(w) for k, w in state.weights.items()}
    load = jnp.asarray([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    after, _ = update(state, zero, CALM[0], load, CONFIG, SETTINGS)
    bias = np.asarray(after.weights["layers.0.ffn.gate.bias"])
    np.testing.assert_allclose(bias, [-1e-3, 1e-3, 0, 0], atol=1e-9)
    assert not np.asarray(after.weights["layers.1.ffn.gate.bias"]).any()


def test_every_tensor_is_in_one_group_and_tables_do_not_decay():
    members = groups(initial_values(CONFIG, 0))
    names = [n for group in members.values() for n in group]
    assert sorted(names) == sorted(initial_values(CONFIG, 0))
    for name in ("embed.weight", "layers.1.engram.embed.weight", "layers.0.attn_norm.weight"):
        assert name in members["plain"]
    assert "head.weight" in members["decayed"]
    assert all(".hc_" in name for name in members["mixes"])


def test_the_rate_warms_up_holds_falls_and_warms_up_again_after_a_resume():
    s = TrainingSettings(steps=1000, warmup=100, decay_from=0.5, lr_final=0.1, rewarm=10)

    def rate(step, since):
        n = [jnp.asarray(x, jnp.int32) for x in (step, since, step - since)]
        return float(learning_rate(s, *n)) / s.lr

    assert rate(0, 0) == pytest.approx(0.01)
    assert rate(300, 300) == pytest.approx(1.0)
    assert rate(750, 750) == pytest.approx(0.55)
    assert rate(1000, 1000) == pytest.approx(0.1)
    assert rate(300, 0) == pytest.approx(0.1)
    assert rate(320, 20) == pytest.approx(1.0)
