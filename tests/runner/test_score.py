"""Prompt rows scored against the token after them: values, places, and bounded memory."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_network import golden_network

from deepinfer_jax.model.transformer import unembed
from deepinfer_jax.runner.layout import Bucket, Flag, Part
from deepinfer_jax.runner.schedule import StepInput, derive
from deepinfer_jax.runner.score import CHUNK, by_row, score_rows
from deepinfer_jax.runner.step import StepOptions, init_state, step
from deepinfer_jax.runner.step import _scores as step_scores
from deepinfer_jax.sampling.sampler import RowParams, processed_logprobs, raw_logprobs

BUCKET = Bucket(rows=8, decoder_rows=8, parts=3, updates=4)


@pytest.fixture(scope="module")
def network(golden):
    return golden_network(golden, "f32")


def row_params(n, temperature=1.0, top_p=1.0, top_k=-1):
    return RowParams(
        temperature=jnp.full(n, temperature, jnp.float32),
        top_p=jnp.full(n, top_p, jnp.float32),
        top_k=jnp.full(n, top_k, jnp.int32),
        seed=jnp.zeros((n, 2), jnp.uint32),
        position=jnp.zeros(n, jnp.int32),
    )


def hidden_rows(network, n, seed=0):
    width = network.network.config.hidden_size
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, width)), jnp.float32)


@pytest.mark.parametrize(("processed", "chunk"), [(False, 64), (True, 3)])
def test_scores_are_read_off_the_same_tables_as_the_log_probs_of_draws(network, processed, chunk):
    n, vocab = 10, network.network.config.vocab_size
    hidden, draw = hidden_rows(network, n), row_params(n, temperature=0.7, top_k=5)
    logits = unembed(network.params, hidden, network.network)
    target = np.array(np.argsort(-np.asarray(logits), -1)[np.arange(n), np.arange(n) // 2])
    target[[2, 5]] = -1
    made = score_rows(
        network.params,
        hidden,
        jnp.asarray(target, jnp.int32),
        draw,
        net=network.network,
        processed=processed,
        top=4,
        chunk=chunk,
    )
    if processed:
        table = processed_logprobs(logits, draw.temperature, draw.top_p, draw.top_k).logprobs
    else:
        table = raw_logprobs(logits)
    known = target >= 0
    np.testing.assert_allclose(
        made.logprob, np.where(known, np.asarray(table)[np.arange(n), target], 0), atol=1e-5
    )
    assert np.asarray(made.greedy).tolist() == [True, True] + [False] * 8
    assert not np.asarray(made.bad).any()
    order = np.argsort(-np.asarray(table), -1, kind="stable")[:, :4]
    np.testing.assert_array_equal(made.top_ids, np.where(known[:, None], order, 0))
    assert 0 <= target.max() < vocab


def test_a_tie_is_greedy_for_the_lowest_id_and_a_row_of_no_numbers_is_bad(network):
    flat = replace(network.params, head=jax.tree.map(jnp.zeros_like, network.params.head))
    hidden = hidden_rows(network, 4).at[3].set(jnp.nan)
    target = jnp.asarray([0, 1, -1, 0], jnp.int32)
    made = score_rows(
        flat, hidden, target, row_params(4), net=network.network, processed=False, top=0
    )
    assert np.asarray(made.greedy).tolist()[:3] == [True, False, False]
    assert np.asarray(made.bad).tolist() == [False, False, False, True]
    vocab = network.network.config.vocab_size
    np.testing.assert_allclose(made.logprob[:2], -np.log(vocab), rtol=1e-6)
    assert made.top_ids.shape == (4, 0)


def test_scores_of_kept_rows_stand_at_their_places_in_the_step(network):
    hidden = hidden_rows(network, 3)
    target = jnp.asarray([7, 8, -1], jnp.int32)
    made = score_rows(
        network.params, hidden, target, row_params(3), net=network.network, processed=False, top=1
    )
    placed = by_row(made, jnp.asarray([4, 1, 6], jnp.int32), 6)
    assert np.flatnonzero(placed.logprob).tolist() == [1, 4]
    assert placed.logprob[4] == made.logprob[0] and placed.top_ids[1] == made.top_ids[1]


def plan(bucket, *parts):
    ints, floats = bucket.empty()
    ids, columns, *_ = bucket.split(ints)
    at = 0
    for i, part in enumerate(parts):
        tokens = part.pop("ids", [0])
        flags = Flag.DRAWS
        if len(tokens) > 1:
            flags |= Flag.PROMPT
            ids[at : at + len(tokens)] = tokens
        part = {"count": len(tokens), "limit": 1000, "offset": at, "flags": flags} | part
        for name, value in part.items():
            columns[i, Part[name.upper()]] = value
        at += len(tokens)
    return StepInput(jnp.asarray(ints), jnp.asarray(floats))


def test_a_row_is_scored_against_the_next_of_its_part_from_the_given_position_on(network):
    state = init_state(network.network, slots=3, positions=64)
    given = plan(
        BUCKET,
        {"slot": 0, "score_from": 0},  # decodes: never scored
        {"slot": 1, "ids": [11, 12, 13], "start": 6, "score_from": 7, "next": 44},
        {"slot": 2, "ids": [21, 22], "start": 0, "score_from": 0},
    )
    made = derive(state, given, BUCKET)
    assert np.asarray(made.target).tolist() == [-1, -1, 13, 44, 22, -1, -1, -1]
    assert np.asarray(made.owner)[:6].tolist() == [0, 1, 1, 1, 2, 2]
    unscored = plan(BUCKET, {"slot": 1, "ids": [11, 12, 13], "start": 6, "next": 44})
    assert (np.asarray(derive(state, unscored, BUCKET).target) == -1).all()


def test_scores_stand_at_the_rows_of_the_step_when_the_decoder_runs_fewer(network):
    state = init_state(network.network, slots=3, positions=64)
    narrow = Bucket(rows=8, decoder_rows=5, parts=3, updates=4)
    parts = [
        {"slot": 0, "ids": [11, 12, 13, 14], "keep_from": 3},  # trimmed, and not scored
        {"slot": 1, "ids": [21, 22, 23], "score_from": 0, "next": 24},
    ]
    hidden = hidden_rows(network, 8)
    made = []
    for bucket in (BUCKET, narrow):
        given = plan(bucket, *(dict(part) for part in parts))
        schedule = derive(state, given, bucket, truncate=True)
        index = schedule.kept.index
        here = hidden if index is None else hidden[index]
        options = StepOptions(prompt=1)
        made.append(
            step_scores(network.params, here, schedule, network.network, bucket, options, 1)
        )
    whole, few = made
    assert np.flatnonzero(np.asarray(few.logprob)).tolist() == [4, 5, 6]
    np.testing.assert_allclose(few.logprob, whole.logprob, atol=1e-5)
    np.testing.assert_array_equal(few.top_ids, whole.top_ids)


def test_only_a_program_that_scores_has_arrays_for_it(network):
    bucket = Bucket(rows=8, decoder_rows=5, parts=3, updates=4)
    state = jax.eval_shape(lambda: init_state(network.network, slots=3, positions=64))
    for prompt in (None, 0, 4):
        options = StepOptions(prompt=prompt, truncate="compact")
        run = partial(step, net=network.network, bucket=bucket, options=options)
        _, out = jax.eval_shape(run, network.params, state, StepInput(*bucket.empty()))
        if prompt is None:
            assert out.prompt is None
        else:
            assert out.prompt.logprob.shape == out.prompt.greedy.shape == (8,)
            assert out.prompt.top_ids.shape == out.prompt.top_logprobs.shape == (8, prompt)


def test_memory_does_not_grow_with_rows_times_vocabulary(network):
    """A vocabulary as wide as the release's: the logits of all rows would be 2 GB."""
    vocab, width = 129_280, network.network.config.hidden_size
    wide = replace(
        network.params,
        head=jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        norm=jax.ShapeDtypeStruct((width,), jnp.float32),
    )

    def temporary(rows):
        def run(params, hidden, target, draw):
            return score_rows(
                params, hidden, target, draw, net=network.network, processed=False, top=2
            )

        shapes = jax.eval_shape(lambda: row_params(rows))
        hidden = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        target = jax.ShapeDtypeStruct((rows,), jnp.int32)
        compiled = jax.jit(run).lower(wide, hidden, target, shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(CHUNK), temporary(64 * CHUNK)
    assert many < few + 64 * CHUNK * width * 16
    assert many < 10 * CHUNK * vocab * 4
