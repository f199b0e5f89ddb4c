"""The law of the compiled code: vocabulary of 8, blocks of 2, the first three tokens, chi-square.

Sequences run side by side, two and two of which share a budget of rows.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.draft import draft_token
from deepinfer_jax.sampling.lengths import budget, split, survival
from deepinfer_jax.sampling.sampler import RowParams
from deepinfer_jax.sampling.verify import verify

RULES = ("coupled", "rejection", "block")
SAMPLES, CHUNK, V = 200_000, 25_000, 8
RNG = np.random.default_rng(7)
TARGET = (0.7 * RNG.normal(size=(V + 1, V))).astype(np.float32)  # last row: no token yet
# Far from the target, so that randomness which returns in a later step shows in the law.
DRAFTER = TARGET + (2 * RNG.normal(size=TARGET.shape)).astype(np.float32)
# Of both drafts after a token; that of the second knows the first and is all or nothing.
FIRST_SURE = RNG.uniform(0.4, 0.9, V + 1).astype(np.float32)
SECOND_SURE = np.where(np.arange(V) % 2, 0.95, 0.02).astype(np.float32)
# What each pair of a last token and a first draft makes of survivals, and that of no step at all.
SURVIVALS = survival(
    np.stack([FIRST_SURE.repeat(V), np.tile(SECOND_SURE, V + 1)], axis=1).astype(np.float32)
)
UNKNOWN = len(SURVIVALS)
SIZES, MS = np.arange(2, 7), np.array([1.0, 1.65, 1.85, 2.0, 2.05])


@cache
def budgets():
    """Rows of two sequences, int32 [u + 1, u + 1], by the index of each one's survivals."""
    values = np.concatenate([SURVIVALS, np.ones((1, 2), np.float32)])
    both = np.full(2, 2)
    found = [[budget(np.stack([a, b]), both, SIZES, MS) for b in values] for a in values]
    return np.array(found, np.int32)


@jax.jit(static_argnums=0)
def two_drafts(rule, last, rows, count_of, total):
    """One step; drafts are offered by the first of them, or as a total of each pair allows.

    `count_of` int32 [p, v], -1: by the total; `total` int32 [p / 2]: rows, -1: the budget of this
    very step.
    """
    target, drafter = jnp.asarray(TARGET), jnp.asarray(DRAFTER)
    first, law = draft_token(drafter[last], rows, rule=rule, place=0)
    moved = dataclasses.replace(rows, position=rows.position + np.int32(1))
    second, next_law = draft_token(drafter[first], moved, rule=rule, place=1)
    laws = None if law is None or next_law is None else jnp.stack([law, next_law], axis=1)
    logits = jnp.stack([target[last], target[first], target[second]], axis=1)
    seen = last * np.int32(V) + first
    pair = seen.reshape(-1, 2)
    total = jnp.where(total < 0, jnp.asarray(budgets())[pair[:, 0], pair[:, 1]], total)
    values = jnp.asarray(SURVIVALS)[pair]
    shared = jax.vmap(split)(values, jnp.full(pair.shape, 2, jnp.int32), total) - np.int32(1)
    count = jnp.take_along_axis(count_of, first[:, None], axis=1)[:, 0]
    count = jnp.where(count < 0, shared.reshape(-1), count)
    out = verify(rule, logits, jnp.stack([first, second], axis=1), count, laws, rows)
    return out.tokens, out.emitted, seen


def p_value(rule, schedule, seed=1):
    """Of chi-square, that the first three tokens follow the target."""
    written, length = np.zeros((SAMPLES, 6), np.int32), np.zeros(SAMPLES, np.int32)
    seen = np.full((3, SAMPLES), UNKNOWN)
    for step in range(3):
        unfinished = np.flatnonzero(length < 3)
        for at in np.split(unfinished, range(CHUNK, unfinished.size, CHUNK)):
            part = np.resize(at, CHUNK)
            last = np.where(length[part] == 0, V, written[part, length[part] - 1])
            seeds = np.stack([part + seed, np.zeros(CHUNK)], axis=1).astype(np.uint32)
            off, position = np.full(CHUNK, -1, np.int32), 10 + length[part]
            rows = RowParams(*np.ones((2, CHUNK), np.float32), off, seeds, position)
            given = schedule(step, last, seen[:, part])
            tokens, emitted, index = map(np.asarray, two_drafts(rule, last, rows, *given))
            real = np.arange(at.size)  # the last chunk repeats some sequences
            written[at[:, None], length[at, None] + np.arange(3)] = tokens[real]
            length[at] += emitted[real]
            seen[step, at] = index[real]
    observed = np.bincount(written[:, :3] @ np.array([64, 8, 1]), minlength=512)
    p = np.exp(TARGET.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    expected = SAMPLES * (p[V][:, None, None] * p[:V, :, None] * p[None, :V]).ravel()
    assert expected.min() > 5
    chi_square = ((observed - expected) ** 2 / expected).sum()
    return float(jax.scipy.stats.chi2.sf(np.float32(chi_square), np.float32(511)))


NO_TOTAL = np.full(CHUNK // 2, 2, np.int32)
BY_TOTAL = np.full((CHUNK, V), -1, np.int32)


def all_drafts(step, last, seen):
    return np.full((CHUNK, V), 2, np.int32), NO_TOTAL


def by_lot(step, last, seen):
    lots = np.random.default_rng(step).integers(0, 3, (CHUNK, 1)).astype(np.int32)
    return np.broadcast_to(lots, (CHUNK, V)), NO_TOTAL


def by_threshold(step, last, seen):
    """Drafts that survive with a chance of one half."""
    table = (SURVIVALS > 0.5).sum(axis=1, dtype=np.int32).reshape(V + 1, V)
    return table[last], NO_TOTAL


def best_of_two(step, last, seen):
    """A total that knows nothing goes to the likeliest drafts of two sequences."""
    return BY_TOTAL, np.random.default_rng(step).integers(2, 7, CHUNK // 2).astype(np.int32)


def old_budget(step, last, seen):
    """The total is the best for the drafts of two steps ago, kept or not."""
    old = seen[step - 2] if step >= 2 else np.full(CHUNK, UNKNOWN)
    return BY_TOTAL, budgets()[old[::2], old[1::2]]


def budget_of_this_step(step, last, seen):
    return BY_TOTAL, np.full(CHUNK // 2, -1, np.int32)


LAWS = [(r, s) for r in RULES for s in (all_drafts, by_threshold, best_of_two, old_budget)]
LAWS += [("original", all_drafts), ("original", by_lot)]


@pytest.mark.parametrize(("rule", "schedule"), LAWS)
def test_compiled_tokens_follow_the_target(rule, schedule):
    assert p_value(rule, schedule) > 1e-3 / len(LAWS)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_chi_square_finds_a_budget_that_looks_at_the_drafts_it_is_for(rule):
    assert len(np.unique(budgets()[:UNKNOWN, :UNKNOWN])) > 2
    assert p_value(rule, budget_of_this_step) < 1e-9


def test_coupling_is_exact_whatever_chose_the_offer():
    assert p_value("coupled", budget_of_this_step) > 1e-3
