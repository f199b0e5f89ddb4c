import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.draft import draft_token
from deepinfer_jax.sampling.original import (
    ROW_STRIDE,
    original_logprobs,
    sample_original,
    verify_original,
)
from deepinfer_jax.sampling.philox import philox4x32, split64
from deepinfer_jax.sampling.sampler import Purpose, RowParams, processed_logprobs, sample
from deepinfer_jax.sampling.verify import uniform, verify

RULES = ("coupled", "rejection", "block", "original")
P, V, G = 64, 32, 4
compiled = jax.jit(verify, static_argnums=0)
draft = jax.jit(draft_token, static_argnames="rule")
draw = jax.jit(sample)
draw_as_original, judge_as_original = jax.jit(sample_original), jax.jit(verify_original)


def judge(rule, logits, drafts, count, draft_logprobs, rows, allowed=None, forced=None):
    """`verify` compiled; with masks that do nothing in place of None, so one program is enough."""
    allowed = np.ones(logits.shape, bool) if allowed is None else allowed
    forced = np.full(logits.shape[:2], -1, np.int32) if forced is None else forced
    return compiled(rule, logits, drafts, count, draft_logprobs, rows, allowed, forced)


def rows_of(p, temperature=1.0, top_p=1.0, top_k=-1, seed=17, position=5):
    def filled(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), p))

    seeds = np.stack([split64(int(s)) for s in np.broadcast_to(seed, p)])
    return RowParams(
        filled(temperature, np.float32),
        filled(top_p, np.float32),
        filled(top_k, np.int32),
        jnp.asarray(seeds),
        filled(position, np.int32),
    )


def moved(rows, places):
    return dataclasses.replace(rows, position=rows.position + jnp.asarray(places, jnp.int32))


def mixed_rows(p, seed=0):
    """All kinds of settings: greedy, cold, as is and hot, with and without either filter."""
    rng, which = np.random.default_rng(seed), np.arange(p)
    return rows_of(
        p,
        np.array([0.0, 0.3, 0.8, 1.2])[which % 4],
        np.where(which % 3 == 0, 1, rng.uniform(0.3, 1, p)),
        np.where(which % 5 < 3, -1, rng.integers(1, 20, p)),
        rng.integers(0, 2**63, p),
        rng.integers(1, 10**6, p),
    )


class Step:
    """A step of p sequences over a target and a drafter that look at one token back."""

    def __init__(self, rule, rows=None, seed=0, same=False, p=P):
        rng = np.random.default_rng(seed)
        self.target = (2 * rng.normal(size=(V, V))).astype(np.float32)
        noise = 0 if same else rng.normal(size=(V, V)).astype(np.float32)
        self.drafter = self.target + noise
        self.rows = mixed_rows(p, seed) if rows is None else rows
        self.last = rng.integers(0, V, p).astype(np.int32)
        self.count = rng.integers(0, G + 1, p).astype(np.int32)
        self.drafts, laws, at = np.zeros((p, G), np.int32), [], self.last
        for place in range(G):
            rows = moved(self.rows, place)
            at, law = draft(self.drafter[at], rows, rule=rule, place=np.int32(place))
            self.drafts[:, place] = at = np.asarray(at)
            laws.append(law)
        self.draft_logprobs = None if rule == "coupled" else np.stack(laws, axis=1)

    @property
    def context(self):
        """The token before each place, were all drafts kept: int32 [p, g + 1]."""
        return np.concatenate([self.last[:, None], self.drafts], axis=1)

    def arguments(self, allowed=None, forced=None):
        logits = self.target[np.maximum(self.context, 0)]
        return [logits, self.drafts, self.count, self.draft_logprobs, self.rows, allowed, forced]


def leaves(result):
    return [np.asarray(x) for x in jax.tree.leaves(result)]


# Coupled: nothing but speed depends on the drafts.


def test_coupled_tokens_are_those_of_a_chain_of_draws_bit_for_bit():
    step = Step("coupled")
    # Which tokens a grammar allows after a token; half of the sequences have one.
    grammar = np.random.default_rng(1).random((2, V, V)) < 0.5
    grammar[0], grammar[:, :, 3] = True, True
    has = np.arange(P) % 2
    chain, at = [], step.last
    for place in range(G + 1):
        chain.append(draw(step.target[at], moved(step.rows, place), grammar[has, at]))
        at = np.asarray(chain[-1].token)
    chain = jax.tree.map(lambda *x: np.stack(x, axis=1), *chain)
    # Drafts that are right for a while, of every length.
    right = np.arange(P) // 8 % (G + 1)
    step.drafts = np.where(
        np.arange(G) < right[:, None], chain.token[:, :G], (chain.token[:, :G] + 1) % V
    )
    got = judge("coupled", *step.arguments(allowed=grammar[has[:, None], step.context]))
    np.testing.assert_array_equal(got.accepted, np.minimum(right, step.count))
    emitted = np.arange(G + 1) < np.asarray(got.emitted)[:, None]
    assert_same_bits(got.tokens, np.where(emitted, chain.token, np.int32(0)))
    for name in ("raw_logprob", "processed_logprob", "kept", "bad"):
        assert_same_bits(np.asarray(getattr(got, name))[emitted], getattr(chain, name)[emitted])
        assert not np.asarray(getattr(got, name))[~emitted].any()


def test_coupled_drafts_are_the_draws_of_the_target_on_the_same_logits():
    step = Step("coupled", same=True)
    got = judge("coupled", *step.arguments())
    np.testing.assert_array_equal(got.accepted, step.count)


# Every rule.


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_keep_every_draft(rule):
    step = Step(rule, same=True)
    step.count[:] = G
    got = judge(rule, *step.arguments())
    assert np.asarray(got.accepted).tolist() == [G] * P
    np.testing.assert_array_equal(got.tokens[:, :G], step.drafts)
    if rule != "original":
        # With nothing to replace, the last token is the one that is drawn without drafts.
        last = draw(step.arguments()[0][:, G], moved(step.rows, G))
        np.testing.assert_array_equal(got.tokens[:, G], last.token)


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_has_the_same_bits_in_any_company(rule):
    step = Step(rule)
    whole = step.arguments()
    expected = leaves(judge(rule, *whole))
    order = np.random.default_rng(2).permutation(P)
    for index in (order, np.array([7])):
        part = [None if x is None else jax.tree.map(lambda a, i=index: a[i], x) for x in whole]
        for got, want in zip(leaves(judge(rule, *part)), expected, strict=True):
            assert_same_bits(got, want[index])
    # Padding sequences, and whatever stands behind the drafts that were offered.
    logits, drafts, count, draft_logprobs, rows, *_ = whole
    beyond = np.arange(G) >= count[:, None]
    logits[:, 1:][beyond] = np.nan
    drafts = np.where(beyond, -1, drafts)
    if draft_logprobs is not None:
        draft_logprobs = np.where(beyond[..., None], np.float32(np.nan), draft_logprobs)
    padding = np.arange(P) % 3 == 0
    logits[padding], count[padding] = np.nan, 0
    got = leaves(judge(rule, logits, drafts, count, draft_logprobs, rows))
    for x, want in zip(got, expected, strict=True):
        assert_same_bits(x[~padding], want[~padding])


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_the_filter_or_a_grammar_rules_out_is_refused(rule):
    step = Step(rule, rows_of(P, top_k=3, position=np.arange(1, P + 1)))
    step.count[:] = G
    ranked = np.argsort(-step.target[step.last], axis=-1)
    step.drafts[:, 0] = np.where(np.arange(P) % 2, ranked[:, 3], -1)
    allowed = np.ones((P, G + 1, V), bool)
    allowed[np.arange(0, P, 4), 0, ranked[::4, 0]] = False
    step.drafts[::4, 0] = ranked[::4, 0]
    if rule != "coupled":
        # As if the draft had been the drafter's only choice: a uniform cannot save it.
        step.draft_logprobs[:, 0] = np.where(
            np.arange(V) == np.maximum(step.drafts[:, :1], 0), np.float32(0), np.float32(-np.inf)
        )
    got = judge(rule, *step.arguments(allowed=allowed))
    assert not np.asarray(got.accepted).any()
    rank = np.argmax(ranked == np.asarray(got.tokens[:, :1]), axis=1)
    # Where the best is ruled out, the filter keeps one more.
    assert set(rank[::4].tolist()) <= {1, 2, 3} and set(np.delete(rank, np.s_[::4])) <= {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_minus_one_is_refused_though_token_0_is_all_but_certain(rule):
    step = Step(rule)
    step.count[:] = G
    step.drafts[:, 0] = -1
    logits, *others = step.arguments()
    logits[:, 0, 0] = 99
    got = judge(rule, logits, *others)
    assert not np.asarray(got.accepted).any()
    assert not np.asarray(got.tokens[:, 0]).any()


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_greedy_sequences_emit_the_argmax_and_keep_what_agrees_with_it(rule):
    step = Step(rule, rows_of(P, temperature=0.0, top_k=5))
    expected = judge("coupled", *step.arguments())
    for got, want in zip(leaves(judge(rule, *step.arguments())), leaves(expected), strict=True):
        assert_same_bits(got, want)
    assert set(np.asarray(expected.accepted).tolist()) == set(range(G + 1))


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_without_drafts_a_sequence_emits_what_it_would_anyway(rule):
    step = Step(rule)
    step.count[:] = 0
    logits, drafts, count, laws, rows, *_ = step.arguments()
    want = draw(logits[:, 0], rows)
    for width in (G, 0):
        got = judge(rule, logits[:, : width + 1], drafts[:, :width], count, laws[:, :width], rows)
        assert_same_bits(got.tokens[:, 0], want.token)
        assert_same_bits(got.processed_logprob[:, 0], want.processed_logprob)
        assert np.asarray(got.emitted).tolist() == [1] * P


@pytest.mark.parametrize("rule", RULES)
def test_forced_tokens_replace_the_decision_and_the_token(rule):
    step = Step(rule)
    forced = np.random.default_rng(3).integers(0, V, (P, G + 1)).astype(np.int32)
    step.drafts[::2] = forced[::2, :G]
    step.drafts[::4, 2] = (forced[::4, 2] + 1) % V
    step.drafts[1, 0] = -1
    got = judge(rule, *step.arguments(forced=forced))
    agrees = np.cumprod(step.drafts == forced[:, :G], axis=1).sum(axis=1)
    np.testing.assert_array_equal(got.accepted, np.minimum(agrees, step.count))
    emitted = np.arange(G + 1) < np.asarray(got.emitted)[:, None]
    np.testing.assert_array_equal(got.tokens, np.where(emitted, forced, 0))
    raw = jax.nn.log_softmax(step.arguments()[0])
    raw = np.take_along_axis(raw, forced[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(got.raw_logprob, np.where(emitted, raw, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got.processed_logprob, np.zeros((P, G + 1)))


@pytest.mark.parametrize("rule", RULES)
def test_places_after_the_forced_ones_are_judged_as_ever(rule):
    step = Step(rule, same=True)
    step.count[:] = G
    free = judge(rule, *step.arguments())
    forced = np.full((P, G + 1), -1, np.int32)
    forced[:, :2] = step.drafts[:, :2]
    got = judge(rule, *step.arguments(forced=forced))
    assert_same_bits(got.tokens, free.tokens)
    forced[:, 1] = (forced[:, 1] + 1) % V
    got = judge(rule, *step.arguments(forced=forced))
    np.testing.assert_array_equal(got.accepted, np.full(P, 1))
    np.testing.assert_array_equal(got.tokens[:, :2], forced[:, :2])


@pytest.mark.parametrize("rule", RULES)
def test_an_unusable_row_ends_the_step_if_it_is_reached(rule):
    step = Step(rule, same=True)
    step.count[:] = np.arange(P) % (G + 1)
    step.drafts[:, 2] = np.arange(P) // 8 % 2  # 0 is also what such a row emits
    logits, *others = step.arguments()
    logits[:, 2, 7] = np.nan
    logits[1, 2], logits[4, 2, 0] = -np.inf, np.inf
    got = judge(rule, logits, *others)
    np.testing.assert_array_equal(got.accepted, np.minimum(step.count, 2))
    reached = (np.arange(G + 1) == 2) & (step.count[:, None] >= 2)
    np.testing.assert_array_equal(got.bad, reached)
    assert not np.asarray(got.tokens)[reached].any()
    assert all(np.isfinite(x).all() for x in leaves(got))


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_log_probs_are_those_of_the_target_also_after_a_refusal(rule):
    step = Step(rule)
    got = judge(rule, *step.arguments())
    assert (np.asarray(got.accepted) < step.count).any()
    rows = jax.tree.map(lambda x: np.repeat(x, G + 1, axis=0), step.rows)
    logits = step.arguments()[0].reshape(-1, V)
    law = processed_logprobs(logits, rows.temperature, rows.top_p, rows.top_k)
    emitted = np.arange(G + 1) < np.asarray(got.emitted)[:, None]
    for values, kind in ((law.logprobs, "processed"), (jax.nn.log_softmax(logits), "raw")):
        values = np.asarray(values).reshape(P, G + 1, V)
        want = np.take_along_axis(values, np.asarray(got.tokens)[..., None], axis=-1)[..., 0]
        actual = np.asarray(getattr(got, f"{kind}_logprob"))[emitted]
        np.testing.assert_allclose(actual, want[emitted], rtol=1e-5, atol=1e-6)
        assert np.isfinite(actual).all()
    kept = np.asarray(law.kept).reshape(P, G + 1)
    np.testing.assert_array_equal(got.kept, np.where(emitted, kept, 0))


def test_the_original_rule_is_its_rows_one_by_one():
    step = Step("original")
    got = judge("original", *step.arguments())
    logits, drafts, count, draft_logprobs, rows, *_ = step.arguments()
    settings = rows.temperature, rows.top_p, rows.top_k, rows.seed
    alive, tokens = np.ones(P, bool), np.zeros((P, G + 1), np.int32)
    accepted = np.zeros(P, np.int32)
    for place in range(G + 1):
        keys = rows.position + np.int32(place * ROW_STRIDE)
        none = np.zeros(P, bool)
        out = draw_as_original(logits[:, place], *settings, keys, none)
        token, kept = np.asarray(out.token), none
        if place < G:
            judged = judge_as_original(
                logits[:, place], draft_logprobs[:, place], drafts[:, place], *settings, keys
            )
            offered = place < count
            token = np.where(offered, judged.token, token)
            kept = offered & np.asarray(judged.accepted)
        tokens[alive, place] = token[alive]
        alive &= kept
        accepted += alive
    np.testing.assert_array_equal(got.accepted, accepted)
    np.testing.assert_array_equal(got.tokens, tokens)
    assert set(accepted.tolist()) == set(range(G + 1))


# Randomness.


def test_uniforms_are_the_stated_word_in_the_open_interval(monkeypatch):
    seed, position = rows_of(50, seed=2**40 + 3).seed, jnp.arange(50, dtype=jnp.int32)
    for start, last in ((None, 0), (jnp.full((50,), 9, jnp.int32), 9)):
        got = uniform(seed, position, Purpose.ACCEPTANCE, start)
        words = philox4x32(
            (seed[:, 0], seed[:, 1]),
            tuple(jnp.asarray(x, jnp.uint32) for x in (0, 1, position, last)),
        )[0]
        exact = (np.asarray(words, np.float64) + 0.5) / 2**32
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, rtol=1e-7)
    ends = jnp.asarray(np.array([0, 2**32 - 1], np.uint32))
    monkeypatch.setattr("deepinfer_jax.sampling.verify.philox4x32", lambda *_: (ends,))
    low, high = uniform(seed[:2], position[:2], Purpose.ACCEPTANCE).tolist()
    assert (low, high) == (2.0**-33, 1 - 2.0**-24)


@pytest.mark.parametrize("rule", ("rejection", "block"))
def test_drafts_of_two_steps_at_one_position_are_independent(rule):
    flat, drawn = np.zeros((P, V), np.float32), []
    for position in range(70, 90):
        rows = rows_of(P, seed=np.arange(P), position=position)
        drafts = [draft(flat, rows, rule=rule, place=np.int32(k))[0] for k in (0, 1, 2, 0)]
        drawn.append([*drafts, draw(flat, rows).token])
    first, second, third, again, shared = np.array(drawn).swapaxes(0, 1)
    assert_same_bits(again, first)
    for other in (second, third, shared):
        assert np.mean(first == other) < 3 / V


def test_drafts_are_drawn_with_the_settings_of_the_target():
    rows = mixed_rows(P)
    logits = np.random.default_rng(5).normal(size=(P, V)).astype(np.float32)
    settings = rows.temperature, rows.top_p, rows.top_k
    for rule, want in (
        ("rejection", processed_logprobs(logits, *settings).logprobs),
        ("block", processed_logprobs(logits, *settings).logprobs),
        ("original", jax.jit(original_logprobs)(logits, *settings).logprobs),
    ):
        token, law = draft(logits, rows, rule=rule, place=np.int32(0))
        np.testing.assert_allclose(law, want, rtol=1e-5, atol=1e-6)
        assert np.isfinite(np.take_along_axis(np.asarray(law), np.asarray(token)[:, None], 1)).all()
    token, law = draft(logits, rows, rule="coupled", place=np.int32(3))
    assert law is None
    assert_same_bits(token, draw(logits, rows).token)


# Errors.


def test_an_unknown_rule_is_refused_by_name():
    step = Step("coupled")
    for call in (
        lambda: verify("greedy", *step.arguments()),
        lambda: draft_token(jnp.zeros((2, V)), step.rows, rule="greedy", place=0),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            "Verification rule 'greedy' is unknown. "
            "There are 4 of them: coupled, rejection, block, original. "
            "Name one of those; coupled emits the same tokens as without drafts."
        )
