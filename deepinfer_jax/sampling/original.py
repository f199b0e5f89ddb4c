"""The `original` draw: the fixed-point draw, filter and draft verification of DeepInfer 0.1.0.

Only for comparing tokens with the original engine: its target total sits near 2^31, where one
unit in the last place of the normaliser can decide whether a random word is discarded, and its
temperature 0 is sampling at 1e-5. The `stable` draw has neither trait.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.sampling.philox import Pair, add64, multiply64, philox4x32
from deepinfer_jax.sampling.sampler import clean_rows

_ONE = np.float32(1)
_ZERO = np.float32(0)
_MINUS_INF = np.float32(-np.inf)
_TWO31 = np.float32(2.0**31)
_ALL_BITS = np.uint32(0xFFFFFFFF)
_NEVER = np.uint32(0xFFFFFFFF)

GREEDY_TEMPERATURE = np.float32(1e-5)
ROW_STRIDE = 10_000_019
_DRAFT_SEED_SHIFT = 1_000_000_007
_DRAFT_LOGPROB_PENALTY = np.float32(5e-5)
_START_MAXIMUM = np.float32(-1e30)
_CHUNK = 8192
_WORKERS = 256
_RUN = 8
_LANES = 2048
_DRAW, _REPLACEMENT, _ACCEPTANCE = 0, 1, 2


@partial(jax.tree_util.register_dataclass, data_fields=["logprobs", "kept", "bad"], meta_fields=[])
@dataclass(frozen=True)
class OriginalLaw:
    """Processed log-probs float32 [n, v] (dropped tokens -inf), kept int32 [n], bad bool [n].

    A bad row (NaN, +inf, or all -inf; the original stops the process there) has the values of
    all-zero logits.
    """

    logprobs: jax.Array
    kept: jax.Array
    bad: jax.Array


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "accepted", "accept_prob", "logprob", "kept", "bad"],
    meta_fields=[],
)
@dataclass(frozen=True)
class OriginalDraw:
    """What a row emitted.

    Attributes:
        token: int32 [n]; 0 on a bad row.
        accepted: bool [n], the draft was accepted; True on rows that verify nothing.
        accept_prob: float32 [n], 1 - residual mass, not below 0; 1 on rows that verify nothing.
        logprob: float32 [n], the token's processed log-prob.
        kept: int32 [n], how many tokens survived the filter.
        bad: bool [n].
    """

    token: jax.Array
    accepted: jax.Array
    accept_prob: jax.Array
    logprob: jax.Array
    kept: jax.Array
    bad: jax.Array


def _fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """a b + c in float32 with (but for rare double roundings) one rounding.

    The factors are cut to 12 bits by a mask, so that all partial products are exact whether or
    not the compiler contracts them.
    """

    def halves(x: jax.Array) -> Pair:
        bits = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFFF000)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    product = a * b
    error = (a_high * b_high - product) + a_high * b_low + a_low * b_high + a_low * b_low
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    # Infinities (a ruled-out logit) would turn the corrections into NaN.
    return jnp.where(jnp.isfinite(product), total + (lost + error), product + c)


def _worker_sums(values: jax.Array, workers: int, run: int) -> jax.Array:
    """Sum of float32 [..., m]: each worker adds its runs in ascending order, then a tree."""
    width = workers * run
    pad = -values.shape[-1] % width
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)])
    rounds = jnp.moveaxis(values.reshape(*values.shape[:-1], -1, workers, run), -3, 0)

    def add_run(total: jax.Array, columns: jax.Array) -> tuple[jax.Array, None]:
        for column in range(run):
            total = total + columns[..., column]
        return total, None

    totals, _ = lax.scan(add_run, jnp.zeros(rounds.shape[1:-1], jnp.float32), rounds)
    while workers > 1:
        workers //= 2
        totals = totals[..., :workers] + totals[..., workers:]
    return totals[..., 0]


def _ordered_sum(values: jax.Array, vocab_size: int) -> jax.Array:
    """Sum the last axis in the order of the original's kernel for this vocabulary."""
    if vocab_size >= _CHUNK:
        return _worker_sums(values, _WORKERS, _RUN)
    width = 1 << max(0, (vocab_size - 1).bit_length())
    workers = min(128, width)
    return _worker_sums(values, workers, width // workers)


def _normaliser(logits: jax.Array, inverse: jax.Array) -> Pair:
    """Minus the log of the sum of exp((x - max) / T), and the max; float32 [n, 1] each."""
    rows, vocab_size = logits.shape
    chunk = _CHUNK if vocab_size >= _CHUNK else vocab_size
    pad = -vocab_size % chunk
    chunks = jnp.pad(logits, [(0, 0), (0, pad)], constant_values=_MINUS_INF)
    chunks = chunks.reshape(rows, -1, chunk)
    maxima = lax.cummax(jnp.maximum(jnp.max(chunks, axis=-1), _START_MAXIMUM), axis=1)
    parts = _ordered_sum(jnp.exp((chunks - maxima[..., None]) * inverse[..., None]), vocab_size)

    def add_chunk(state: Pair, chunk_result: Pair) -> tuple[Pair, None]:
        total, maximum = state
        part, new_maximum = chunk_result
        fade = jnp.exp((maximum - new_maximum) * inverse[:, 0])
        return (_fused_multiply_add(fade, total, part), new_maximum), None

    start = jnp.zeros((rows,), jnp.float32), jnp.full((rows,), _START_MAXIMUM)
    (total, maximum), _ = lax.scan(add_chunk, start, (parts.T, maxima.T))
    return -jnp.log(total)[:, None], maximum[:, None]


def _fixed(probs: jax.Array) -> jax.Array:
    """Probabilities as uint32 with 31 fractional bits, truncated."""
    return (probs * _TWO31).astype(jnp.uint32)


def _kept_mask(
    logits: jax.Array,
    logprobs: jax.Array,
    logprob_of: Callable[[jax.Array], jax.Array],
    top_p: jax.Array,
    top_k: jax.Array,
    k_on: jax.Array,
) -> jax.Array:
    """The tokens of [n, v] that the joint top-p, top-k filter keeps, bool [n, v].

    Distinct logits are visited from the highest down until the weight or the count reaches what
    is needed; of the tokens equal to the last value only as many as needed stay, by lowest id.
    """
    vocab_size = logits.shape[-1]
    p_on = top_p < _ONE
    need_p = jnp.where(p_on, (top_p * _TWO31).astype(jnp.uint32) + np.uint32(1), _NEVER)
    need_k = jnp.where(k_on, top_k, np.int32(vocab_size + 1))
    ordered = -jnp.sort(-logits, axis=-1)
    mass = jnp.cumsum(_fixed(jnp.exp(logprob_of(ordered))), axis=-1, dtype=jnp.uint32)
    count = jnp.arange(1, vocab_size + 1, dtype=jnp.int32)
    last_of_value = jnp.pad(
        ordered[:, 1:] != ordered[:, :-1], [(0, 0), (0, 1)], constant_values=True
    )
    hit = last_of_value & ((mass >= need_p[:, None]) | (count >= need_k[:, None]))
    stop = jnp.argmax(hit, axis=-1)[:, None]
    threshold = jnp.take_along_axis(ordered, stop, axis=-1)
    above, tied = logits > threshold, logits == threshold
    count_above = jnp.sum(above, axis=-1, dtype=jnp.int32)
    weights = jnp.where(above, _fixed(jnp.exp(logprobs)), np.uint32(0))
    mass_above = jnp.sum(weights, axis=-1, dtype=jnp.uint32)
    prob = jnp.exp(logprob_of(threshold))[:, 0]
    left = (need_p - mass_above).astype(jnp.float32) / _TWO31
    whole = np.float32(vocab_size)
    places_p = jnp.ceil(jnp.minimum(left / jnp.where(prob > _ZERO, prob, _ONE), whole))
    places_p = jnp.where(prob > _ZERO, places_p, _ZERO).astype(jnp.int32)
    places = jnp.minimum(
        jnp.where(p_on, places_p, np.int32(vocab_size)), jnp.maximum(need_k - count_above, 0)
    )
    rank = jnp.cumsum(tied, axis=-1, dtype=jnp.int32)
    keep = above | (tied & (rank <= places[:, None]))
    # Truncated weights may never add up to need_p; then every token stays.
    return keep | ~jnp.any(hit, axis=-1, keepdims=True)


def original_logprobs(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    allowed: jax.Array | None = None,
) -> OriginalLaw:
    """Processed log-probs in the original's arithmetic and order of summation.

    Args:
        logits: float32 [n, v].
        temperature: float32 [n]; below 1e-5 it becomes 1e-5 and the filter is off.
        top_p: float32 [n] in (0, 1].
        top_k: int32 [n]; 0 and negative are off.
        allowed: bool [n, v] or None.
    """
    vocab_size = logits.shape[-1]
    logits, bad = clean_rows(logits, allowed)
    greedy = temperature < GREEDY_TEMPERATURE
    temperature = jnp.maximum(temperature, GREEDY_TEMPERATURE)
    inverse = (_ONE / temperature)[:, None]
    log_scale, top = _normaliser(logits, inverse)

    def logprob_with(scale: jax.Array, values: jax.Array) -> jax.Array:
        return _fused_multiply_add(values - top, inverse, scale)

    unfiltered = logprob_with(log_scale, logits)
    finite = logits > _MINUS_INF
    k_on = (top_k > np.int32(0)) & (top_k < np.int32(vocab_size))
    wanted = ((top_p < _ONE) | k_on) & ~greedy

    def filtered() -> Pair:
        logprob_of = partial(logprob_with, log_scale)
        keep = finite & _kept_mask(logits, unfiltered, logprob_of, top_p, top_k, k_on)
        kept_mass = _ordered_sum(jnp.where(keep, jnp.exp(unfiltered), _ZERO), vocab_size)
        again = logprob_with(log_scale - jnp.log(kept_mass)[:, None], logits)
        again = jnp.where(keep, again, _MINUS_INF)
        on = wanted[:, None]
        return jnp.where(on, again, unfiltered), jnp.where(on, keep, finite)

    logprobs, keep = lax.cond(jnp.any(wanted), filtered, lambda: (unfiltered, finite))
    return OriginalLaw(logprobs, jnp.sum(keep, axis=-1, dtype=jnp.int32), bad)


def _stream(position: jax.Array, case: int) -> Pair:
    """The 64-bit stream number 3 position + case."""
    return add64(multiply64(position.astype(jnp.uint32), 3), case)


def _words(seed: Pair, stream: Pair, block: jax.Array) -> jax.Array:
    """Block `block` (uint32 [n]) of each row's stream: uint32 [n, 4]."""
    return jnp.stack(philox4x32(seed, (block, jnp.zeros_like(block), *stream)), axis=-1)


def _draw(weights: jax.Array, seed: Pair, stream: Pair) -> Pair:
    """Invert the cumulative weights, uint32 [n, v]: token int32 [n] and total uint32 [n].

    A row without weight has total 0 and a meaningless token.
    """
    rows, vocab_size = weights.shape
    lanes = _LANES if vocab_size >= _CHUNK else 1 << max(0, (vocab_size - 1).bit_length())
    # Lane by lane and inside a lane by ascending id is one running sum over the transposed grid.
    grid = jnp.pad(weights, [(0, 0), (0, -vocab_size % lanes)]).reshape(rows, -1, lanes)
    depth = grid.shape[1]
    running = jnp.cumsum(grid.swapaxes(1, 2).reshape(rows, -1), axis=-1, dtype=jnp.uint32)
    total = running[:, -1]
    divisor = jnp.maximum(total, np.uint32(1))
    limit = lax.div(jnp.full_like(divisor, _ALL_BITS), divisor) * divisor

    def again(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[1] >= limit)

    def next_word(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, word = state
        block = jnp.full_like(total, index // np.uint32(4))
        words = _words(seed, stream, block)
        fresh = lax.dynamic_index_in_dim(words, index % np.uint32(4), axis=1, keepdims=False)
        return index + np.uint32(1), jnp.where(word >= limit, fresh, word)

    # 2^32 - 1 is never below a limit, so every row takes its first word.
    start = (jnp.uint32(0), jnp.full_like(total, _ALL_BITS))
    _, word = lax.while_loop(again, next_word, start)
    target = lax.rem(word, divisor)
    place = jnp.sum(running <= target[:, None], axis=-1, dtype=jnp.int32)
    token = place // np.int32(depth) + place % np.int32(depth) * np.int32(lanes)
    return token, total


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


def sample_original(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    draft: jax.Array,
    allowed: jax.Array | None = None,
) -> OriginalDraw:
    """Draw one token per row as the original does.

    Args:
        logits: float32 [n, v].
        temperature: float32 [n].
        top_p: float32 [n].
        top_k: int32 [n].
        seed: uint32 [n, 2], low word first.
        position: int32 [n], the position key: the length before the step plus ROW_STRIDE times
            the row's place in its verification block.
        draft: bool [n], the row drafts, so its seed is shifted.
        allowed: bool [n, v] or None.
    """
    law = original_logprobs(logits, temperature, top_p, top_k, allowed)
    low, high = seed[:, 0], seed[:, 1]
    shifted = add64((low, high), _DRAFT_SEED_SHIFT)
    key = jnp.where(draft, shifted[0], low), jnp.where(draft, shifted[1], high)
    token, _ = _draw(_fixed(jnp.exp(law.logprobs)), key, _stream(position, _DRAW))
    token = jnp.where(law.bad, np.int32(0), token)
    ones = jnp.ones_like(temperature)
    return OriginalDraw(
        token, ones.astype(jnp.bool_), ones, _at(law.logprobs, token), law.kept, law.bad
    )


def verify_original(
    logits: jax.Array,
    draft_logprobs: jax.Array,
    draft_token: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    allowed: jax.Array | None = None,
) -> OriginalDraw:
    """Accept a draft token per row, or replace it from the residual, as the original does.

    Args:
        logits: float32 [n, v], the target's.
        draft_logprobs: float32 [n, v], the processed log-probs the draft was drawn from.
        draft_token: int32 [n]; -1 is always rejected.
        temperature: float32 [n].
        top_p: float32 [n].
        top_k: int32 [n].
        seed: uint32 [n, 2], low word first.
        position: int32 [n], the position key, as in `sample_original`.
        allowed: bool [n, v] or None.
    """
    law = original_logprobs(logits, temperature, top_p, top_k, allowed)
    key = seed[:, 0], seed[:, 1]
    drafted = jnp.maximum(draft_token, np.int32(0))
    gain = _at(law.logprobs, drafted) - _at(draft_logprobs, drafted)
    word = _words(key, _stream(position, _ACCEPTANCE), jnp.zeros_like(key[0]))[:, 0]
    uniform = word.astype(jnp.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    accepted = (draft_token >= 0) & (uniform < jnp.exp(jnp.minimum(gain, _ZERO))) & ~law.bad

    # The small penalty keeps a residual when the two distributions are equal.
    penalised = jnp.exp(draft_logprobs - _DRAFT_LOGPROB_PENALTY)
    residual = _fixed(jnp.maximum(jnp.exp(law.logprobs) - penalised, _ZERO))
    replacement, mass = _draw(residual, key, _stream(position, _REPLACEMENT))
    best = jnp.argmax(clean_rows(logits, allowed)[0], axis=-1).astype(jnp.int32)
    replacement = jnp.where(mass > np.uint32(0), replacement, best)
    token = jnp.where(accepted, drafted, jnp.where(law.bad, np.int32(0), replacement))
    accept_prob = jnp.maximum(_ONE - mass.astype(jnp.float32) / _TWO31, _ZERO)
    return OriginalDraw(token, accepted, accept_prob, _at(law.logprobs, token), law.kept, law.bad)
