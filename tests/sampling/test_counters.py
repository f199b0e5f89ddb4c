"""Which random words a sequence uses: no decision shares one with another decision.

Every call of the generator is written down with what it was for, over every place where a step can
start, every number of drafts offered, and every number of them kept. Words that are made and
dropped, since nothing is decided by them, are told apart from those that decide.
"""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.sampling import draft, original, sampler, verify
from deepinfer_jax.sampling.philox import split64
from deepinfer_jax.sampling.sampler import Purpose, RowParams

G, V, FIRST, LAST = 3, 12, 5, 11
SEED = 0xFEDCBA9876543210
# Steps that the engine could run: (first position, drafts offered, drafts kept).
STEPS = [
    (start, count, kept)
    for start in range(FIRST, LAST)
    for count in range(G + 1)
    for kept in range(count + 1)
]
RIGHT, WRONG = 1, 2  # a token that the target always keeps, and one that it never does


class Recorder:
    """Calls of the generator: for each what it was for and key and counter of every row."""

    def __init__(self):
        self.calls, self._for = [], ["?"]

    @contextmanager
    def doing(self, what):
        self._for.append(what)
        yield
        self._for.pop()

    def philox(self, key, counter):
        words = np.broadcast_arrays(*(np.asarray(x, np.uint32) for x in (*key, *counter)))
        rows = np.stack(words, -1).reshape(words[0].shape[0], -1, 6)
        self.calls.append((self._for[-1], [{tuple(map(int, w)) for w in row} for row in rows]))
        return own_philox(key, counter)

    def wrap(self, patch, module, name, what):
        own = getattr(module, name)

        def wrapped(*args, **kwargs):
            with self.doing(what):
                return own(*args, **kwargs)

        patch.setattr(module, name, wrapped)


own_philox = sampler.philox4x32


def law(token, other):
    """Log-probs with nearly all weight on one token and none on another."""
    logits = np.full(V, -4.0, np.float32)
    logits[token], logits[other] = 9.0, -np.inf
    return logits


def rows_at(positions):
    n = len(positions)
    return RowParams(
        jnp.ones(n, jnp.float32),
        jnp.ones(n, jnp.float32),
        jnp.full(n, -1, jnp.int32),
        jnp.broadcast_to(jnp.asarray(split64(SEED)), (n, 2)),
        jnp.asarray(positions, jnp.int32),
    )


@cache
def words_of(rule):
    """For each of STEPS, decision -> the words that it takes.

    A decision is (role, position of the token). Roles: `draft`, `acceptance`, `emission` (of the
    token after the drafts that were kept).
    """
    recorder, drafted = Recorder(), []
    starts = np.array([start for start, _, _ in STEPS], np.int32)
    count = np.array([count for _, count, _ in STEPS], np.int32)
    kept = np.array([kept for _, _, kept in STEPS], np.int32)
    places = np.arange(G)
    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        for module in (sampler, verify, original):
            patch.setattr(module, "philox4x32", recorder.philox)
        flat = np.zeros((len(STEPS), V), np.float32)
        for place in range(G):
            with recorder.doing("draft"):
                rows = rows_at(starts + place)
                drafted.append(draft.draft_token(flat, rows, rule=rule, place=place)[1])
        recorder.wrap(patch, verify, "uniform", "acceptance")
        recorder.wrap(patch, verify, "draw_token", "emission")
        recorder.wrap(patch, verify, "sample", "emission")
        recorder.wrap(patch, verify, "sample_original", "fresh")
        recorder.wrap(patch, verify, "verify_original", "judged")
        # The target never keeps the token WRONG, and RIGHT is likelier under it than as a draft.
        drafts = np.where(places < kept[:, None], RIGHT, WRONG).astype(np.int32)
        target = np.broadcast_to(law(RIGHT, WRONG), (len(STEPS), G + 1, V))
        laws = None if rule == "coupled" else jnp.stack(drafted, axis=1)
        out = verify.verify(rule, target, drafts, count, laws, rows_at(starts))
    np.testing.assert_array_equal(out.accepted, kept)
    return [decisions(rule, recorder.calls, i, *step) for i, step in enumerate(STEPS)]


def decisions(rule, calls, i, start, count, kept):
    """Of step `i`: what was decided by which words."""
    of = {what: [rows for name, rows in calls if name == what] for what in dict(calls)}
    found = {("draft", start + k): rows[i] for k, rows in enumerate(of["draft"])}
    if rule == "coupled":
        # Every place is drawn as without drafts; those up to the first difference decide.
        (drawn,) = of["emission"]
        return found | {("emission", start + k): drawn[i * (G + 1) + k] for k in range(kept + 1)}
    judged = range(count) if rule == "block" else range(min(kept + 1, count))
    if rule == "original":
        # Of each row that was judged, two calls: its acceptance, then its replacement.
        uniforms, replacements, *again = of["judged"]
        for k in judged:
            found["acceptance", start + k] = uniforms[i * G + k]
        last = [of["fresh"]] if kept == count else [[replacements, *again]]
        row = i if kept == count else i * G + kept
        found["emission", start + kept] = set().union(*(rows[row] for rows in last[0]))
        return found
    (uniforms,) = of["acceptance"]
    for k in judged:
        found["acceptance", start + k] = uniforms[i * (G + 1) + k]
    (drawn,) = of["emission"]
    return found | {("emission", start + kept): drawn[i]}


def decided(rule, step, words, *, read):
    """The decisions of a step; with `read` only those drafts that were judged."""
    start, count, kept = step
    last = count if rule == "block" else min(kept + 1, count)
    return {
        what: w
        for what, w in words.items()
        if what[0] != "draft" or not read or what[1] < start + last
    }


def shared(rule, *, read):
    """Pairs of decisions of one sequence that share a word, as (step, decision) twice.

    Of two steps, the later one starts behind what the earlier one emitted, so that all pairs of
    steps are all that a sequence can run.
    """
    found, all_words = [], words_of(rule)
    for a, first in zip(STEPS, all_words, strict=True):
        own = list(decided(rule, a, first, read=read).items())
        for i, (what, words) in enumerate(own):
            found += [(a, what, a, other) for other, w in own[i + 1 :] if words & w]
        for b, second in zip(STEPS, all_words, strict=True):
            if b[0] < a[0] + a[2] + 1:
                continue
            for what, words in own:
                later = decided(rule, b, second, read=read).items()
                found += [(a, what, b, other) for other, w in later if words & w]
    return found


def test_the_enumeration_covers_every_role_position_and_number_of_drafts():
    for rule in ("rejection", "block"):
        for (start, count, kept), words in zip(STEPS, words_of(rule), strict=True):
            roles = {role: [p for r, p in words if r == role] for role, _ in words}
            assert roles["draft"] == [start + k for k in range(G)]
            assert roles["emission"] == [start + kept]
            judged = count if rule == "block" else min(kept + 1, count)
            assert roles.get("acceptance", []) == [start + k for k in range(judged)]
            assert {len(w) for (role, _), w in words.items() if role != "acceptance"} == {V // 4}
            assert {w[:2] for ws in words.values() for w in ws} == {tuple(map(int, split64(SEED)))}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_acceptance_and_replacement_never_share_a_word(rule):
    assert shared(rule, read=False) == []


def test_the_enumeration_finds_a_shared_word(monkeypatch):
    words_of.cache_clear()
    same = SimpleNamespace(SHARED_DRAW=Purpose.SHARED_DRAW, ACCEPTANCE=2, REPLACEMENT=2)
    monkeypatch.setattr(verify, "Purpose", same)
    found = {(one[0], other[0]) for _, one, _, other in shared("rejection", read=False)}
    words_of.cache_clear()
    assert found == {("acceptance", "emission")}


def test_a_draft_that_the_target_shares_its_noise_with_uses_its_very_words():
    for (start, _, kept), words in zip(STEPS, words_of("coupled"), strict=True):
        for position in range(start, start + min(kept + 1, G)):
            assert words["draft", position] == words["emission", position]
    apart = [pair for pair in shared("coupled", read=False) if pair[1][1] != pair[3][1]]
    assert apart == []  # but nothing is shared by two positions


def test_the_original_shares_words_only_with_drafts_that_nobody_judged():
    assert shared("original", read=True) == []
    # Its drafts are keyed by position alone, so that one that was dropped is drawn again alike.
    pairs = shared("original", read=False)
    assert pairs and {(one[0], other[0]) for _, one, _, other in pairs} == {("draft", "draft")}
    assert all(one[1] == other[1] for _, one, _, other in pairs)
