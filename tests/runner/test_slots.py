"""A sequence that is taken out of its slot and put into another one is whole."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.cache import init_cache
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.runner.compile import compile_moves, one_device_mesh
from deepinfer_jax.runner.slots import PAGES
from deepinfer_jax.runner.step import init_state

NOWHERE = np.full(PAGES, -1, np.int32)


@pytest.mark.parametrize("drafter", [False, True])
def test_what_does_not_grow_moves_with_its_slot(golden, drafter):
    config = ModelConfig.from_file(golden)
    net = Network(config, arithmetic("f32"), select(Device.described("cpu")), drafter=drafter)
    state, rng = init_state(net, slots=3, positions=128), np.random.default_rng(0)
    cache = init_cache(config, net.arithmetic, slots=3, positions=128, drafter=drafter)
    made = {
        name: rng.standard_normal(ring.shape).astype(np.float32)
        for name in ("window", "draft")
        if (ring := getattr(cache, name)) is not None
    }
    assert ("draft" in made) == drafter
    mesh = one_device_mesh()
    state = replace(state, cache=replace(cache, **made))
    out, back = compile_moves(mesh, state)
    moved = back(jax.device_put(state), out(state, np.int32(1), NOWHERE), np.int32(2), NOWHERE)
    for name, before in made.items():
        after = np.asarray(getattr(moved.cache, name))
        np.testing.assert_array_equal(after[:, 2], before[:, 1])
        np.testing.assert_array_equal(after[:, :2], before[:, :2])
