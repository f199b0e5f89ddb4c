"""Masks along the drafts: what a grammar forbids is never emitted, and the law stays the target's.

A small automaton stands for a grammar. Of a step's drafts the first one that it forbids and all
after it are -1; the mask of row j is that of the state after j drafts, and of a row that no state
belongs to, nothing at all.
"""

import dataclasses
import itertools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling.accept import accept_block, accept_token_wise, leading
from deepinfer_jax.sampling.draft import draft_token
from deepinfer_jax.sampling.sampler import RowParams, processed_logprobs
from deepinfer_jax.sampling.verify import verify

V, G, TOKENS, END = 4, 2, 3, 3
EXACT = 1e-12
EDGE = 1e-13
# State and token -> next state, -1 where the token is forbidden; END only in two states.
GRAMMAR = np.array([[1, 0, -1, -1], [-1, 2, 0, -1], [2, -1, 1, 0], [0, 3, -1, 3]])
SETTINGS = [(1.0, 1.0, -1), (0.7, 0.8, -1), (1.3, 1.0, 2), (0.0, 0.6, 3)]  # temperature, top-p, -k
KINDS = (np.float32, np.float32, np.int32)
RULES = ("coupled", "rejection", "block")


def state_after(tokens, state=0):
    """The automaton's state, -1 once a token was forbidden."""
    for token in tokens:
        state = -1 if state < 0 else int(GRAMMAR[state, token])
    return state


def allowed_after(tokens):
    state = state_after(tokens)
    return GRAMMAR[state] >= 0 if state >= 0 else np.zeros(V, bool)


def logits_after(who, tokens):
    return np.random.default_rng([who, *tokens]).normal(0, 1.5, V).astype(np.float32)


def law(logits, allowed, temperature, top_p, top_k):
    """Probabilities float64 [v] of a masked row after temperature and filter, written out."""
    logits = np.where(allowed, logits.astype(np.float64), -np.inf)
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return np.eye(V)[order[0]]
    weights = np.exp((logits - logits.max()) / temperature)
    probability = weights / weights.sum()
    before = np.cumsum(probability[order]) - probability[order]
    keep = before < top_p if top_p < 1 else np.ones(V, bool)
    if 0 < top_k < V:
        keep &= np.arange(V) < top_k
    kept = np.zeros(V)
    kept[order[keep]] = probability[order[keep]]
    return kept / kept.sum()


def target(tokens, settings):
    return law(logits_after(1, tokens), allowed_after(tokens), *settings)


def drafter(tokens, settings):
    """Drafts are drawn without the mask."""
    return law(logits_after(2, tokens), np.ones(V, bool), *settings)


def offered(drafts, prefix=()):
    """The drafts with -1 from the first forbidden one on."""
    states = [state_after(prefix + drafts[: j + 1]) for j in range(len(drafts))]
    return tuple(d if s >= 0 else -1 for d, s in zip(drafts, states, strict=True))


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_law_of_a_masked_row_is_the_one_written_out_here(settings):
    prefixes = [t for n in range(3) for t in itertools.product(range(V), repeat=n)]
    prefixes = [t for t in prefixes if state_after(t) >= 0]
    columns = zip(*[settings] * len(prefixes), strict=True)
    got = processed_logprobs(
        np.stack([logits_after(1, t) for t in prefixes]),
        *(jnp.asarray(c, k) for c, k in zip(columns, KINDS, strict=True)),
        np.stack([allowed_after(t) for t in prefixes]),
    )
    wanted = np.stack([target(t, settings) for t in prefixes])
    np.testing.assert_allclose(np.exp(got.logprobs), wanted, atol=1e-6)
    np.testing.assert_array_equal(np.isfinite(got.logprobs), wanted > 0)


ACCEPT = {"rejection": jax.jit(accept_token_wise), "block": jax.jit(accept_block)}
count_leading = jax.jit(leading)


def chances(rule, p, q, drafts, count):
    """The thresholds of the uniforms: of each draft token-wise, of each prefix in a block."""
    ratio = [p[j, d] / q[j, d] if d >= 0 else 0.0 for j, d in enumerate(drafts)]
    if rule == "rejection":
        return np.minimum(1, ratio)
    found, s = np.ones(G), 1.0
    for i in range(1, G + 1):
        s = min(1.0, s * ratio[i - 1])
        if i < count:
            mass = np.maximum(s * p[i] - q[i], 0).sum()
            found[i - 1] = mass / (mass + 1 - s) if mass + 1 - s > 0 else 1.0
        elif i == count:
            found[i - 1] = s
    return found


def cases_of(prefix, settings, cut):
    """Every block of drafts: chance, drafts as offered, count, and the laws p and q."""
    for drawn in itertools.product(range(V), repeat=G):
        p = np.stack([target(prefix + drawn[:j], settings) if state_after(prefix + drawn[:j]) >= 0
                      else np.eye(V)[0] for j in range(G + 1)])  # fmt: skip
        q = np.stack([drafter(prefix + drawn[:j], settings) for j in range(G)])
        chance = float(np.prod(q[np.arange(G), list(drawn)]))
        drafts = offered(drawn, prefix)
        count = sum(d >= 0 for d in drafts) if cut else G
        if chance > 0:
            yield chance, drafts, count, p, q


def judged(rule, prefix, settings, cut):
    """What one step emits, with probabilities, under a rule with uniforms."""
    rows = []
    for chance, drafts, count, p, q in cases_of(prefix, settings, cut):
        limits = chances(rule, p, q, drafts, count)
        for above in itertools.product((False, True), repeat=G):
            sides = np.where(above, 1 - limits, limits)
            if sides.prod() > 0:
                uniforms = np.where(above, limits + EDGE * sides, limits * (1 - EDGE))
                rows.append((chance * sides.prod(), drafts, count, p, q, uniforms))
    weight, drafts, count, p, q, uniforms = (np.array(x) for x in zip(*rows, strict=True))
    pad = 4 * V**G - len(rows)  # one shape, so one program
    with np.errstate(divide="ignore"), jax.enable_x64(True):
        given = np.log(p), np.log(q), drafts.astype(np.int32), count.astype(np.int32), uniforms
        verdict = ACCEPT[rule](*(np.concatenate([x, x[:1].repeat(pad, 0)]) for x in given))
        accepted, _, logprobs = map(np.asarray, verdict)
    last = np.exp(logprobs)
    last /= last.sum(axis=1, keepdims=True)
    found = defaultdict(float)
    for row, share in enumerate(weight):
        kept = tuple(drafts[row, : accepted[row]].tolist())
        assert -1 not in kept
        for token in range(V):
            found[*kept, token] += share * last[row, token]
    return found


def coupled(_, prefix, settings, cut):
    """The same where a draft is kept while it equals the target's own draw."""
    rows = []
    for chance, drafts, count, p, _ in cases_of(prefix, settings, cut):
        for drawn in itertools.product(range(V), repeat=G + 1):
            weight = chance * float(np.prod(p[np.arange(G + 1), list(drawn)]))
            if weight > 0:
                rows.append((weight, drafts, count, drawn))
    weight, drafts, count, drawn = (np.array(x) for x in zip(*rows, strict=True))
    pad = V ** (2 * G + 1) - len(rows)
    equal = np.pad(drawn[:, :G] == drafts, [(0, pad), (0, 0)])
    accepted = np.asarray(count_leading(equal, np.pad(count, (0, pad)).astype(np.int32)))
    found = defaultdict(float)
    for row, share in enumerate(weight):
        found[tuple(drawn[row, : accepted[row] + 1].tolist())] += share
    return found


OUTCOMES = {"coupled": coupled, "rejection": judged, "block": judged}


def emitted_law(rule, settings, cut=False):
    """The joint law of the first three tokens, however many steps they take."""
    found, waiting = np.zeros((V,) * TOKENS), {(): 1.0}
    while waiting:
        prefix = min(waiting, key=len)
        chance = waiting.pop(prefix)
        for tokens, share in OUTCOMES[rule](rule, prefix, settings, cut).items():
            whole = prefix + tokens
            if share == 0:
                continue
            if len(whole) >= TOKENS:
                found[whole[:TOKENS]] += chance * share
            else:
                waiting[whole] = waiting.get(whole, 0.0) + chance * share
    return found


def joint(settings):
    """What tokens drawn one by one from the masked target follow."""
    found = np.zeros((V,) * TOKENS)
    for tokens in np.ndindex(*found.shape):
        if state_after(tokens) >= 0:
            found[tokens] = np.prod([target(tokens[:j], settings)[t] for j, t in enumerate(tokens)])
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_three_tokens_follow_the_masked_target_exactly(rule, settings):
    wanted = joint(settings)
    assert wanted.sum() == pytest.approx(1)
    np.testing.assert_allclose(emitted_law(rule, settings), wanted, rtol=0, atol=EXACT)


def test_drafts_that_are_left_out_instead_of_refused_would_bias_the_law():
    for rule in ("rejection", "block"):
        law = emitted_law(rule, SETTINGS[0], cut=True)
        assert np.abs(law - joint(SETTINGS[0])).max() > 1e-2


ROWS, STEPS = 1024, 4
compiled = jax.jit(verify, static_argnums=0)
draw_draft = jax.jit(draft_token, static_argnames="rule")


@pytest.mark.parametrize("rule", RULES)
def test_what_is_emitted_is_what_the_grammar_takes(rule):
    rng = np.random.default_rng(3)
    columns = zip(*SETTINGS, strict=True)
    settings = [np.resize(np.asarray(c, t), ROWS) for c, t in zip(columns, KINDS, strict=True)]
    seed = np.stack([np.arange(ROWS), np.full(ROWS, 5)], axis=1).astype(np.uint32)
    state, length = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int32)
    written = np.full((ROWS, STEPS * (G + 1)), -1)
    refused = kept = 0
    for _ in range(STEPS):
        logits = rng.normal(0, 1.5, (ROWS, G + 1, V)).astype(np.float32)
        rows = jax.tree.map(jnp.asarray, RowParams(*settings, seed, 10 + length))
        drafts, laws = np.zeros((ROWS, G), np.int32), []
        allowed, at = np.zeros((ROWS, G + 1, V), bool), state
        for j in range(G):
            allowed[:, j] = np.where(at[:, None] >= 0, GRAMMAR[np.maximum(at, 0)] >= 0, False)
            here = dataclasses.replace(rows, position=rows.position + np.int32(j))
            drawn, q = draw_draft(logits[:, j], here, rule=rule, place=np.int32(j))
            at = np.where(at >= 0, GRAMMAR[np.maximum(at, 0), np.asarray(drawn)], -1)
            drafts[:, j] = np.where(at >= 0, drawn, -1)
            laws.append(q)
        allowed[:, G] = np.where(at[:, None] >= 0, GRAMMAR[np.maximum(at, 0)] >= 0, False)
        laws = None if rule == "coupled" else jnp.stack(laws, axis=1)
        count = np.full(ROWS, G, np.int32)
        out = compiled(rule, logits, drafts, count, laws, rows, allowed)
        assert not np.asarray(out.bad).any()
        tokens, emitted = np.asarray(out.tokens), np.asarray(out.emitted)
        invalid = np.where((drafts < 0).any(1), np.argmax(drafts < 0, 1), G)
        assert (emitted - 1 <= invalid).all()
        refused, kept = refused + (invalid < G).sum(), kept + (emitted - 1).sum()
        # The matcher takes exactly what was emitted, and never a forbidden token.
        for j in range(G + 1):
            live = j < emitted
            state[live] = GRAMMAR[state[live], tokens[live, j]]
            written[live, length[live] + j] = tokens[live, j]
        assert (state >= 0).all()
        length += emitted.astype(np.int32)
    assert refused > ROWS and kept > ROWS / 4
    for row in range(ROWS):
        assert state_after(written[row, : length[row]]) == state[row]
