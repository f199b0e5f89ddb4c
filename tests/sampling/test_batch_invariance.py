"""Draws and log-probs of a row, bit by bit, in every number and order of rows: no kernel table
chooses them, so that they must keep rows apart as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.sampling.original import sample_original
from deepinfer_jax.sampling.philox import split64
from deepinfer_jax.sampling.sampler import RowParams, raw_logprobs, sample, top_logprobs

MOST, VOCAB = 65, 1003
BATCHES = (1, 2, 7, 16, 17, 64)


def stable(logits, rows):
    return sample(logits, rows), top_logprobs(raw_logprobs(logits), 5)


def original(logits, rows):
    drafts = rows.position % 2 == 0
    settings = rows.temperature, rows.top_p, rows.top_k, rows.seed, rows.position
    return sample_original(logits, *settings, drafts)


@pytest.mark.parametrize("draw", [stable, original])
def test_a_row_is_drawn_with_the_same_bits_in_every_batch(draw):
    rng, which = np.random.default_rng(0), np.arange(MOST)
    logits = (4 * rng.normal(size=(MOST, VOCAB))).astype(np.float32)
    rows = RowParams(
        jnp.asarray(np.where(which % 4 == 0, 0, rng.uniform(0.3, 1.5, MOST)), jnp.float32),
        jnp.asarray(np.where(which % 3 == 0, 1, rng.uniform(0.1, 1, MOST)), jnp.float32),
        jnp.asarray(np.where(which % 5 < 3, -1, rng.integers(1, 60, MOST)), jnp.int32),
        jnp.asarray(np.stack([split64(int(s)) for s in rng.integers(0, 2**63, MOST)])),
        jnp.asarray(rng.integers(0, 10**6, MOST), jnp.int32),
    )
    run = jax.jit(draw)
    expected = jax.tree.map(np.asarray, run(logits, rows))
    for number in BATCHES:
        for at in (np.arange(number), rng.permutation(MOST)[:number]):
            made = run(logits[at], jax.tree.map(lambda x, at=at: x[at], rows))
            for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
                assert_same_bits(a, b[at])
