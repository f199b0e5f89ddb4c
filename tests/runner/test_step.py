from functools import partial

import jax
import numpy as np
import pytest
from golden_network import golden_network

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner.step import StepInput, init_state, pack_rows, step
from deepinfer_jax.sampling.sampler import RowParams


def test_rows_are_packed_part_after_part_and_padded_with_nothing():
    rows = pack_rows([(np.array([7, 8]), 5, 1), (np.array([9]), 0, 0)], 5)
    assert rows.ids.tolist() == [7, 8, 9, 0, 0]
    assert rows.position.tolist() == [5, 6, 0, -1, -1]
    assert rows.slot.tolist() == [1, 1, 0, 0, 0]
    assert rows.start.tolist() == [5, 5, 0, 0, 0]
    assert rows.stop.tolist() == [7, 7, 1, 0, 0]
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(rows))


@pytest.fixture(scope="module")
def golden_step(golden):
    """The shapes that a step of 4 rows and 2 draws returns."""
    net = golden_network(golden, "f32")

    def shapes(**options):
        m = 2
        draw = RowParams(
            temperature=np.zeros(m, np.float32),
            top_p=np.ones(m, np.float32),
            top_k=np.zeros(m, np.int32),
            seed=np.zeros((m, 2), np.uint32),
            position=np.zeros(m, np.int32),
        )
        rows = pack_rows([(np.array([7, 8, 9]), 0, 0)], 4)
        cache = jax.eval_shape(lambda: init_state(net.network, slots=1, positions=7))
        run = partial(step, net=net.network, **options)
        inputs = StepInput(rows, np.array([1, 2], np.int32), draw)
        return jax.eval_shape(run, net.params, cache, inputs)

    return shapes


def test_an_unknown_sampler_is_refused_with_the_legal_ones(golden_step):
    with pytest.raises(ConfigError) as caught:
        golden_step(draw="beam")
    assert str(caught.value) == (
        "There is no sampler 'beam'. The samplers are stable, original. "
        "Set engine.sampler to one of them."
    )


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
@pytest.mark.parametrize("draw", ["stable", "original"])
def test_a_step_returns_a_token_and_the_top_of_each_taken_row(golden_step, draw, logprobs):
    cache, out = golden_step(draw=draw, logprobs=logprobs, top=4)
    assert out.draw.token.shape == out.draw.raw_logprob.shape == out.draw.bad.shape == (2,)
    assert (out.top_ids.shape, out.top_logprobs.shape) == ((2, 4), (2, 4))
    assert (out.top_ids.dtype, out.top_logprobs.dtype) == (np.int32, np.float32)
    # 7 positions hold 4 groups of two, the last of them open.
    assert cache.sources[0].entries.shape[1] == 4
