from functools import partial

import jax
import numpy as np
import pytest
from golden_network import golden_network

from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import StepOptions, init_state, pack_rows, step


def test_rows_are_packed_part_after_part_and_padded_with_nothing():
    rows = pack_rows([(np.array([7, 8]), 5, 1), (np.array([9]), 0, 0)], 5)
    assert rows.ids.tolist() == [7, 8, 9, 0, 0]
    assert rows.position.tolist() == [5, 6, 0, -1, -1]
    assert rows.slot.tolist() == [1, 1, 0, 0, 0]
    assert rows.start.tolist() == [5, 5, 0, 0, 0]
    assert rows.stop.tolist() == [7, 7, 1, 0, 0]
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(rows))


@pytest.fixture(scope="module")
def network(golden):
    return golden_network(golden, "f32")


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
@pytest.mark.parametrize("draw", ["stable", "original"])
def test_a_step_returns_a_token_and_the_top_of_each_part(network, draw, logprobs):
    bucket = Bucket(rows=4, decoder_rows=4, parts=2, updates=3)
    state = jax.eval_shape(lambda: init_state(network.network, slots=2, positions=7))
    options = StepOptions(draw=draw, logprobs=logprobs, top=4)
    run = partial(step, net=network.network, bucket=bucket, options=options)
    after, out = jax.eval_shape(run, network.params, state, StepInput(*bucket.empty()))
    assert out.draw.token.shape == out.draw.raw_logprob.shape == (2, 1)
    assert out.emitted.shape == out.ended.shape == (2,)
    assert (out.top_ids.shape, out.top_logprobs.shape) == ((2, 1, 4), (2, 1, 4))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
