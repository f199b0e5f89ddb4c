from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.model.indexer import candidate_blocks
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select

OPS = select(Device.described("cpu"))
chosen = jax.jit(partial(candidate_blocks, ops=OPS), static_argnames=("block", "keep"))


def by_definition(scores, visible, block, keep):
    """Candidate entries of one row, from the definition and without arrays."""
    m = len(scores)
    starts = range(0, m, block)
    best = [max(scores[s : s + block]) for s in starts]
    if visible:
        best[(visible - 1) // block] = np.inf
    order = sorted(range(len(best)), key=lambda b: (-best[b], b))
    kept = {b for b in order[:keep] if best[b] > -np.inf}
    return [j // block in kept for j in range(m)]


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_candidates_are_the_best_blocks_and_the_newest(data):
    m = data.draw(st.sampled_from([11, 12]))
    block, keep = data.draw(st.sampled_from([(4, 2), (4, 1), (4, 3), (1, 3), (5, 2), (4, 9)]))
    values = st.sampled_from([-1.0, -0.0, 0.0, 0.5, 2.0])
    scores = np.full((4, m), -np.inf, np.float32)
    visible = np.asarray(data.draw(st.lists(st.integers(0, m), min_size=4, max_size=4)), np.int32)
    for row, count in zip(scores, visible, strict=True):
        row[:count] = data.draw(st.lists(values, min_size=int(count), max_size=int(count)))
    made = chosen(scores, visible, block=block, keep=keep)
    expected = [by_definition(s, v, block, keep) for s, v in zip(scores, visible, strict=True)]
    np.testing.assert_array_equal(made, expected)


def test_the_newest_block_stays_however_badly_it_scores():
    scores = jnp.asarray([[9.0, 9, 8, 8, 7, 7, -5, -jnp.inf]], jnp.float32)
    made = candidate_blocks(scores, jnp.asarray([7], jnp.int32), block=2, keep=2, ops=OPS)
    assert np.asarray(made)[0].tolist() == [True, True, False, False, False, False, True, True]
