"""The exact law of every rule: all drafts, all outcomes of the dice, over steps, in float64."""

import itertools
from collections import defaultdict
from functools import cache

import jax
import numpy as np
import pytest

from deepinfer_jax.sampling.accept import accept_block, accept_token_wise, leading
from deepinfer_jax.sampling.lengths import split, survival

G, TOKENS = 2, 3
EXACT = 1e-12
EDGE = 1e-13  # how near to a threshold of the uniforms both sides of it are looked at
ACCEPT = {"rejection": jax.jit(accept_token_wise), "block": jax.jit(accept_block)}
count_leading = jax.jit(leading)


@cache
def random_law(seed, vocab, prefix):
    """Some probabilities after some prefix; about one in eight tokens is impossible."""
    rng = np.random.default_rng([seed, vocab, *prefix])
    weights = rng.gamma(1.0, size=vocab) * (rng.random(vocab) > 0.125)
    weights[rng.integers(vocab)] += 0.2
    return weights / weights.sum()


class Model:
    """A target and a drafter: what either says after a prefix."""

    def __init__(self, vocab=3, seed=0, target=None, drafter=None):
        self.vocab = vocab
        self.target = target or (lambda prefix: random_law(2 * seed, vocab, prefix))
        self.drafter = drafter or (lambda prefix: random_law(2 * seed + 1, vocab, prefix))

    def blocks(self, prefix):
        """Every block of drafts with its probability and the laws p [g + 1, v], q [g, v]."""
        for drafts in itertools.product(range(self.vocab), repeat=G):
            p = np.stack([self.target(prefix + drafts[:j]) for j in range(G + 1)])
            q = np.stack([self.drafter(prefix + drafts[:j]) for j in range(G)])
            chance = float(np.prod(q[np.arange(G), list(drafts)]))
            if chance > 0:
                yield drafts, chance, p, q

    def joint(self):
        """What tokens drawn one by one from the target would follow, [v] * 3."""
        law = np.ones((self.vocab,) * TOKENS)
        for tokens in np.ndindex(*law.shape):
            for place, token in enumerate(tokens):
                law[tokens] *= self.target(tokens[:place])[token]
        return law


def token_wise_chances(p, q, drafts, count):
    x = list(drafts)
    return np.minimum(1, p[np.arange(G), x] / q[np.arange(G), x])


def block_chances(p, q, drafts, count):
    """h_1..h_g as published, written out."""
    chances, s = np.ones(G), 1.0
    for i in range(1, G + 1):
        s = min(1.0, s * p[i - 1, drafts[i - 1]] / q[i - 1, drafts[i - 1]])
        if i < count:
            mass = np.maximum(s * p[i] - q[i], 0).sum()
            below = mass + 1 - s
            chances[i - 1] = mass / below if below > 0 else 1.0
        elif i == count:
            chances[i - 1] = s
    return chances


CHANCES = {"rejection": token_wise_chances, "block": block_chances}


def judged_outcomes(rule, model, prefix, count_of):
    """What one step may emit after a prefix, with probabilities, for a rule with uniforms.

    Each uniform is looked at just below and just above its threshold and weighed with the length
    of the side, so a threshold that is off by more than EDGE shows as a wrong law.
    """
    cases = []
    for drafts, chance, p, q in model.blocks(prefix):
        count = count_of(prefix, drafts)
        limits = CHANCES[rule](p, q, drafts, count)
        for above in itertools.product((False, True), repeat=G):
            sides = np.where(above, 1 - limits, limits)
            if sides.prod() == 0:
                continue
            uniforms = np.where(above, limits + EDGE * sides, limits * (1 - EDGE))
            cases.append((drafts, count, chance * sides.prod(), p, q, uniforms))
    drafts, count, chance, p, q, uniforms = (np.array(x) for x in zip(*cases, strict=True))
    pad = 4 * model.vocab**G - len(cases)  # one shape, so one program
    with np.errstate(divide="ignore"), jax.enable_x64(True):
        arguments = np.log(p), np.log(q), drafts.astype(np.int32), count.astype(np.int32), uniforms
        verdict = ACCEPT[rule](*(np.concatenate([x, x[:1].repeat(pad, 0)]) for x in arguments))
        accepted, _, logprobs = map(np.asarray, verdict)
        assert logprobs.dtype == np.float64
    weights = np.exp(logprobs)
    law = weights / weights.sum(axis=1, keepdims=True)
    outcomes = defaultdict(float)
    for row in range(len(cases)):
        kept = tuple(drafts[row, : accepted[row]].tolist())
        for token in range(model.vocab):
            outcomes[*kept, token] += chance[row] * law[row, token]
    return outcomes


def coupled_outcomes(_rule, model, prefix, count_of):
    """The same where a draft is kept while it equals the target's own draw."""
    cases = []
    for drafts, chance, p, _ in model.blocks(prefix):
        for drawn in itertools.product(range(model.vocab), repeat=G + 1):
            weight = chance * float(np.prod(p[np.arange(G + 1), list(drawn)]))
            cases.append((drafts, count_of(prefix, drafts), drawn, weight))
    drafts, count, drawn, weight = (np.array(x) for x in zip(*cases, strict=True))
    pad = model.vocab ** (2 * G + 1) - len(cases)
    equal = np.pad(drawn[:, :G] == drafts, [(0, pad), (0, 0)])
    accepted = np.asarray(count_leading(equal, np.pad(count, (0, pad)).astype(np.int32)))
    outcomes = defaultdict(float)
    for row in range(len(cases)):
        outcomes[tuple(drawn[row, : accepted[row] + 1].tolist())] += weight[row]
    return outcomes


OUTCOMES = {
    "coupled": coupled_outcomes,
    "rejection": judged_outcomes,
    "block": judged_outcomes,
}


def emitted_law(rule, model, count_of):
    """The joint law of the first three tokens, whatever number of steps they take."""
    law = np.zeros((model.vocab,) * TOKENS)
    waiting = {(): 1.0}
    while waiting:
        prefix = min(waiting, key=len)
        chance = waiting.pop(prefix)
        for tokens, share in OUTCOMES[rule](rule, model, prefix, count_of).items():
            whole = prefix + tokens
            if len(whole) >= TOKENS:
                law[whole[:TOKENS]] += chance * share
            else:
                waiting[whole] = waiting.get(whole, 0.0) + chance * share
    return law


def all_drafts(prefix, drafts):
    return G


def by_prefix(prefix, drafts):
    return (len(prefix) + 2 * sum(prefix)) % (G + 1)


def by_earlier_drafts(prefix, drafts):
    """The second draft is offered or not by what the first one is."""
    return 0 if sum(prefix) % 4 == 3 else 2 if drafts[0] != 1 else 1


def survivals(prefix, drafts):
    """Of both drafts; the confidence in the second one knows the first."""
    sure = [np.random.default_rng([7, *prefix, *drafts[:j]]).uniform(0.3, 1) for j in range(G)]
    return survival(np.array(sure, np.float32))


def by_threshold(prefix, drafts):
    return int((survivals(prefix, drafts) > 0.5).sum())


def best_of_two(prefix, drafts):
    """A total that knows nothing of the drafts, shared with a sequence beside this one."""
    both = np.stack([survivals(prefix, drafts), np.array([0.7, 0.4], np.float32)])
    return int(split(both, np.full(2, G), 2 + (1 + 3 * len(prefix)) % 5)[0]) - 1


def early_stop(prefix, drafts):
    """Drafts are admitted while each one raises the tokens per second."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(survivals(prefix, drafts))])
    return int(np.cumprod(np.diff(tokens * (1.0, 0.6, 0.47)) > 0).sum())


# The published counter-example: tokens 0 and 1, and a confidence in the second draft that knows
# the first one.
STEPS_PER_SECOND = (1.0, 0.5, 0.45)


def throughputs(drafts):
    survival = np.cumprod([0.8, 0.9 if drafts[0] == 0 else 0.0])
    return (1 + np.concatenate([[0.0], np.cumsum(survival)])) * STEPS_PER_SECOND


def best_of_this_step(prefix, drafts):
    return int(np.argmax(throughputs(drafts)))


def until_no_gain(prefix, drafts):
    gains = np.diff(throughputs(drafts)) > 0
    return int(np.cumprod(gains).sum())


COIN = Model(2, target=lambda _: np.array([0.7, 0.3]), drafter=lambda _: np.array([0.5, 0.5]))


OFFERS = [all_drafts, by_prefix, by_earlier_drafts, by_threshold, best_of_two, early_stop]


@pytest.mark.parametrize("count_of", OFFERS)
@pytest.mark.parametrize("rule", OUTCOMES)
def test_three_tokens_follow_the_target_exactly(rule, count_of):
    for seed in range(6):
        model = Model(seed=seed)
        np.testing.assert_allclose(
            emitted_law(rule, model, count_of), model.joint(), rtol=0, atol=EXACT
        )


@pytest.mark.parametrize("count_of", [by_threshold, best_of_two, early_stop])
def test_these_offers_depend_on_the_drafts_before(count_of):
    counts = {count_of(prefix, (d, 0)) for prefix in ((), (0,), (1, 2)) for d in range(3)}
    assert len(counts) > 1


def test_an_offer_that_looks_at_the_draft_is_found_biased():
    law = emitted_law("rejection", COIN, best_of_this_step)
    np.testing.assert_allclose(law.sum(axis=(1, 2)), [0.85, 0.15], rtol=0, atol=EXACT)
    assert np.abs(emitted_law("block", COIN, best_of_this_step) - COIN.joint()).max() > 0.05


@pytest.mark.parametrize(
    ("rule", "count_of"),
    [("coupled", best_of_this_step), ("rejection", until_no_gain), ("block", until_no_gain)],
)
def test_on_the_same_instance_an_early_stop_or_coupling_is_exact(rule, count_of):
    law = emitted_law(rule, COIN, count_of)
    np.testing.assert_allclose(law, COIN.joint(), rtol=0, atol=EXACT)


def mean_accepted(rule, model):
    outcomes = OUTCOMES[rule](rule, model, (), all_drafts)
    return sum(share * (len(tokens) - 1) for tokens, share in outcomes.items())


def test_block_verification_keeps_at_least_as_many_drafts():
    gains = [
        mean_accepted("block", Model(seed=seed)) - mean_accepted("rejection", Model(seed=seed))
        for seed in range(8)
    ]
    assert min(gains) > -EXACT
    assert max(gains) > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_a_certain_draft_is_kept_with_its_probability_token_wise_and_coupled(seed):
    def certain(prefix):
        return np.eye(3)[np.argmax(random_law(2 * seed, 3, prefix))]

    model = Model(seed=seed, drafter=certain)
    first = int(np.argmax(certain(())))
    second = int(np.argmax(certain((first,))))
    p1, p2 = model.target(())[first], model.target((first,))[second]
    for rule in ("rejection", "coupled"):
        outcomes = OUTCOMES[rule](rule, model, (), all_drafts)
        lengths = np.zeros(G + 1)
        for tokens, share in outcomes.items():
            lengths[len(tokens) - 1] += share
        np.testing.assert_allclose(
            lengths, [1 - p1, p1 * (1 - p2), p1 * p2], rtol=0, atol=EXACT, err_msg=rule
        )
        law = emitted_law(rule, model, all_drafts)
        np.testing.assert_allclose(law, model.joint(), rtol=0, atol=EXACT)


def test_what_was_not_offered_is_not_read():
    model, rng = Model(), np.random.default_rng(0)
    cases = list(model.blocks(()))
    drafts, _, p, q = (np.array(x) for x in zip(*cases, strict=True))
    count = np.arange(len(cases), dtype=np.int32) % (G + 1)
    uniforms = rng.random((len(cases), G))
    spoilt = p.copy(), q.copy(), drafts.astype(np.int32), count, uniforms.copy()
    for row, offered in enumerate(count):
        spoilt[0][row, offered + 1 :] = np.nan
        spoilt[1][row, offered:] = np.nan
        spoilt[2][row, offered:] = -1
        spoilt[4][row, offered:] = np.nan
    with np.errstate(divide="ignore"):
        clean = np.log(p), np.log(q), drafts.astype(np.int32), count, uniforms
        spoilt = np.log(spoilt[0]), np.log(spoilt[1]), *spoilt[2:]
    for rule, accept in ACCEPT.items():
        with jax.enable_x64(True):
            for got, want in zip(accept(*spoilt), accept(*clean), strict=True):
                np.testing.assert_array_equal(got, want, err_msg=rule)
