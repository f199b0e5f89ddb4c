import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.training.selection import candidate_mask, sortable, top_k_mask


def expected(scores, visible, k):
    out = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
        order = sorted(np.flatnonzero(visible[row]), key=lambda j: (-scores[row][j], j))
        out[row][order[:k]] = True
    return out


@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_mask_holds_the_largest_scores_with_ties_to_the_lower_index(k):
    rng = np.random.default_rng(k)
    scores = rng.integers(-3, 4, (6, 7, 33)).astype(np.float32) / 2
    scores[scores == 0] = rng.choice([0.0, -0.0], (scores == 0).sum())
    visible = rng.random(scores.shape) < 0.7
    mask = top_k_mask(sortable(jnp.asarray(scores), jnp.asarray(visible)), k)
    np.testing.assert_array_equal(mask, expected(scores, visible, k))


def test_candidates_are_the_best_blocks_and_always_the_newest():
    scores = np.arange(32, dtype=np.float32)[None, ::-1].copy()
    keys = sortable(jnp.asarray(scores), jnp.ones(scores.shape, bool))
    mask = candidate_mask(keys, jnp.asarray([[29]]), 4, 3)
    blocks = np.asarray(mask).reshape(8, 4)
    assert blocks.all(1).tolist() == [True, True, False, False, False, False, False, True]
    assert not blocks[2:7].any()
