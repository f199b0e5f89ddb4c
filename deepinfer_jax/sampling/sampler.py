"""The `stable` draw: temperature, top-p with top-k, log-probs, and a token by Gumbel-max.

A token's noise depends on nothing but the seed, the position and the token id (and, where it is
asked for, on where the step started), and no sum over the vocabulary depends on how many rows are
drawn together.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.sampling.philox import philox4x32

_ONE = np.float32(1)
_ZERO = np.float32(0)
_MINUS_INF = np.float32(-np.inf)
_TWO31 = np.float32(2.0**31)
_SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)


class Purpose(IntEnum):
    """What a random word is for: the second counter word, so that uses never share words."""

    SHARED_DRAW = 0
    ACCEPTANCE = 1
    REPLACEMENT = 2
    DRAFT = 3


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "top_k", "seed", "position"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RowParams:
    """How each of n rows is drawn.

    Attributes:
        temperature: float32 [n]; 0 is the true argmax.
        top_p: float32 [n] in (0, 1]; 1 is off.
        top_k: int32 [n]; 0, negative or at least the vocabulary is off.
        seed: uint32 [n, 2], the 64-bit seed of the sequence, low word first.
        position: int32 [n], the absolute position of the token that is being produced.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    seed: jax.Array
    position: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=["logprobs", "kept", "bad"], meta_fields=[])
@dataclass(frozen=True)
class Processed:
    """The distribution that is drawn from.

    Attributes:
        logprobs: float32 [n, v], log-probs after temperature and filter; dropped tokens -inf. A
            greedy row is the point mass on its argmax.
        kept: int32 [n], how many tokens can be drawn.
        bad: bool [n], the row has NaN, +inf or no allowed finite logit: its other values mean
            nothing (they are those of all-zero logits) and its request must fail.
    """

    logprobs: jax.Array
    kept: jax.Array
    bad: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "raw_logprob", "processed_logprob", "kept", "bad"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Draw:
    """One drawn token per row.

    Attributes:
        token: int32 [n].
        raw_logprob: float32 [n], the token's log-prob at temperature 1, before masks and filter.
        processed_logprob: float32 [n], its log-prob in the distribution that was drawn from.
        kept: int32 [n], how many tokens could have been drawn.
        bad: bool [n], as in `Processed`; the token of a bad row is 0.
    """

    token: jax.Array
    raw_logprob: jax.Array
    processed_logprob: jax.Array
    kept: jax.Array
    bad: jax.Array


def tree_sum(values: jax.Array) -> jax.Array:
    """Sum the last axis of float32 [..., v] by halving, in an order fixed by v alone.

    A plain reduction may be ordered by the number of rows as well, and then a row would depend
    on its neighbours.
    """
    size = values.shape[-1]
    width = 1 << max(0, size - 1).bit_length()
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, width - size)])
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values[..., 0]


def gumbel_noise(
    seed: jax.Array,
    position: jax.Array,
    vocab_size: int,
    purpose: Purpose | jax.Array = Purpose.SHARED_DRAW,
    start: jax.Array | None = None,
) -> jax.Array:
    """Standard Gumbel noise, float32 [n, vocab_size], for the tokens of n rows.

    The word of a token is Philox4x32-10 with the seed as key and counter (id // 4, purpose,
    position, start or 0), output word id mod 4; noise = -log(-log1p(-(word + 1/2) / 2^32)).

    Args:
        seed: uint32 [n, 2], low word first.
        position: int32 [n].
        vocab_size: how many tokens.
        purpose: which of the four independent streams; one for all, or uint32 [n].
        start: int32 [n], the first position of the step, for noise that must be fresh in every
            step even where two steps draw for the same position; None for noise of the position.
    """
    blocks = jnp.arange(-(-vocab_size // 4), dtype=jnp.uint32)[None, :]
    key = (seed[:, 0, None], seed[:, 1, None])
    streams = jnp.broadcast_to(jnp.asarray(purpose, jnp.uint32), position.shape)
    counter = (
        blocks,
        streams[:, None],
        position.astype(jnp.uint32)[:, None],
        # Positions are below 2^31, so the high half of the position is free for the step.
        jnp.zeros_like(blocks) if start is None else start.astype(jnp.uint32)[:, None],
    )
    words = jnp.stack(philox4x32(key, counter), axis=-1)
    words = words.reshape(seed.shape[0], -1)[:, :vocab_size]
    # 1 - (word + 1/2) / 2^32 = (~word + 1/2) / 2^32. Each half of the range takes the form that
    # is exact there: float32 rounds the upper end of the other to 1, whose noise is -inf.
    below = (jnp.minimum(words, ~words).astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-32)
    log_survival = jnp.where(words < np.uint32(2**31), jnp.log1p(-below), jnp.log(below))
    return -jnp.log(-log_survival)


def _kept_mask(
    logits: jax.Array, top: jax.Array, temperature: jax.Array, top_p: jax.Array, top_k: jax.Array
) -> jax.Array:
    """Which tokens of [n, v] survive top-p and top-k, bool [n, v].

    Tokens are ordered by logit, highest first, ties by lowest id. Top-p keeps the shortest prefix
    whose probability reaches top_p, top-k the first top_k; the shorter of the two stands. Top-p
    is measured on the whole distribution, before top-k cuts.
    """
    vocab_size = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    weights = jnp.exp((ordered - top) / temperature)
    probs = weights / tree_sum(weights)[:, None]
    # Probabilities in units of 2^-31 are summed as integers: exact, in any order.
    fixed = jnp.round(probs * _TWO31).astype(jnp.uint32)
    mass_before = jnp.cumsum(fixed, axis=-1, dtype=jnp.uint32) - fixed
    needed = jnp.maximum(jnp.ceil(top_p * _TWO31), _ONE).astype(jnp.uint32)
    prefix_p = jnp.sum(mass_before < needed[:, None], axis=-1, dtype=jnp.int32)
    prefix_p = jnp.where(top_p < _ONE, prefix_p, np.int32(vocab_size))
    k_on = (top_k > np.int32(0)) & (top_k < np.int32(vocab_size))
    prefix = jnp.minimum(prefix_p, jnp.where(k_on, top_k, np.int32(vocab_size)))
    threshold = jnp.take_along_axis(ordered, prefix[:, None] - np.int32(1), axis=-1)
    above, tied = logits > threshold, logits == threshold
    places = prefix[:, None] - jnp.sum(above, axis=-1, dtype=jnp.int32, keepdims=True)
    return above | (tied & (jnp.cumsum(tied, axis=-1, dtype=jnp.int32) <= places))


def _filter_on(top_p: jax.Array, top_k: jax.Array, vocab_size: int) -> jax.Array:
    return (top_p < _ONE) | ((top_k > np.int32(0)) & (top_k < np.int32(vocab_size)))


def clean_rows(logits: jax.Array, allowed: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Apply the mask and take unusable rows out of the arithmetic.

    Args:
        logits: float32 [n, v].
        allowed: bool [n, v] or None; tokens that are not allowed become -inf.

    Returns:
        Logits float32 [n, v] whose bad rows are all zero, and `bad` bool [n].
    """
    # -inf is legal (a token that is ruled out), NaN and +inf are not, allowed or not.
    broken = jnp.any(~(logits < np.float32(np.inf)), axis=-1)
    masked = logits if allowed is None else jnp.where(allowed, logits, _MINUS_INF)
    bad = broken | ~jnp.any(masked > _MINUS_INF, axis=-1)
    return jnp.where(bad[:, None], _ZERO, masked), bad


def processed_logprobs(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    allowed: jax.Array | None = None,
) -> Processed:
    """The distribution that is drawn from: mask, temperature, top-p with top-k, renormalised.

    Args:
        logits: float32 [n, v].
        temperature: float32 [n]; 0 gives the point mass on the argmax.
        top_p: float32 [n].
        top_k: int32 [n].
        allowed: bool [n, v], tokens that may be drawn, or None for all.
    """
    vocab_size = logits.shape[-1]
    logits, bad = clean_rows(logits, allowed)
    greedy = (temperature == _ZERO)[:, None]
    divisor = jnp.where(greedy, _ONE, jnp.maximum(temperature[:, None], _SMALLEST_NORMAL))
    top = jnp.max(logits, axis=-1, keepdims=True)
    finite = logits > _MINUS_INF
    wanted = _filter_on(top_p, top_k, vocab_size) & ~greedy[:, 0]
    # The sort is the dear part; a batch in which nobody filters does without it.
    keep = finite & lax.cond(
        jnp.any(wanted),
        lambda: jnp.where(
            wanted[:, None], _kept_mask(logits, top, divisor, top_p, top_k), jnp.bool_(True)
        ),
        lambda: jnp.ones_like(finite),
    )
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keep = jnp.where(greedy, ids == best[:, None], keep)
    scaled = jnp.where(keep, (logits - top) / divisor, _MINUS_INF)
    logprobs = scaled - jnp.log(tree_sum(jnp.exp(scaled)))[:, None]
    return Processed(logprobs, jnp.sum(keep, axis=-1, dtype=jnp.int32), bad)


def raw_logprobs(logits: jax.Array) -> jax.Array:
    """Log-probs float32 [n, v] at temperature 1, before any mask or filter; -inf stays -inf.

    A row that `processed_logprobs` calls bad without a mask has no meaning here either.
    """
    logits, _ = clean_rows(logits, None)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return shifted - jnp.log(tree_sum(jnp.exp(shifted)))[:, None]


def top_logprobs(logprobs: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest tokens of each row, likeliest first, ties by lowest id.

    Args:
        logprobs: float32 [n, v], raw or processed.
        count: how many, at most v; of none, nothing is computed.

    Returns:
        Token ids int32 [n, count] and their log-probs float32 [n, count].
    """
    if count == 0:
        n = logprobs.shape[0]
        return jnp.zeros((n, 0), jnp.int32), jnp.zeros((n, 0), jnp.float32)
    values, ids = lax.top_k(logprobs, count)
    return ids.astype(jnp.int32), values


def draw_token(
    logprobs: jax.Array,
    rows: RowParams,
    *,
    purpose: Purpose | jax.Array = Purpose.SHARED_DRAW,
    start: jax.Array | None = None,
) -> jax.Array:
    """The argmax of log-prob plus Gumbel noise, lowest id on ties, int32 [n].

    Args:
        logprobs: float32 [n, v] of a distribution that is already processed; it need not be
            normalised, but some token of every row must be finite.
        rows: of which only temperature, seed and position are read.
        purpose: which stream of random words, as in `gumbel_noise`.
        start: the first position of the step, or None, as in `gumbel_noise`.
    """
    # On a greedy row only the argmax is finite, so noise cannot move it; a batch of greedy rows
    # does without noise.
    noise = lax.cond(
        jnp.any(rows.temperature != _ZERO),
        lambda: gumbel_noise(rows.seed, rows.position, logprobs.shape[-1], purpose, start),
        lambda: jnp.zeros_like(logprobs),
    )
    return jnp.argmax(logprobs + noise, axis=-1).astype(jnp.int32)


def sample(
    logits: jax.Array,
    rows: RowParams,
    allowed: jax.Array | None = None,
    *,
    purpose: Purpose = Purpose.SHARED_DRAW,
) -> Draw:
    """Draw one token per row: the argmax of processed log-prob plus Gumbel noise.

    A row's result is the same bits whatever rows stand beside it.

    Args:
        logits: float32 [n, v].
        rows: temperature, filter, seed and position of each row.
        allowed: bool [n, v], tokens that may be drawn (a grammar's mask), or None for all.
        purpose: which stream of random words; drafts that are verified by coupling and the
            target share SHARED_DRAW.
    """
    law = processed_logprobs(logits, rows.temperature, rows.top_p, rows.top_k, allowed)
    token = jnp.where(law.bad, np.int32(0), draw_token(law.logprobs, rows, purpose=purpose))

    def at_token(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]

    return Draw(token, at_token(raw_logprobs(logits)), at_token(law.logprobs), law.kept, law.bad)
