"""Verification: which drafts of a step are kept, and the one token that the target adds to them.

A sequence that was offered l drafts has l + 1 rows of target logits; it emits the n <= l drafts
that are kept and one token more. Every rule emits tokens that follow the target's law; under
`coupled` they are the very tokens that would come without drafts.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling.accept import (
    accept_block,
    accept_token_wise,
    check_rule,
    leading,
    of_row,
    of_token,
)
from deepinfer_jax.sampling.original import (
    ROW_STRIDE,
    sample_original,
    verify_original,
)
from deepinfer_jax.sampling.philox import philox4x32
from deepinfer_jax.sampling.sampler import (
    Purpose,
    RowParams,
    draw_token,
    processed_logprobs,
    raw_logprobs,
    sample,
)

_BELOW_ONE = np.float32(1 - 2.0**-24)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "accepted", "raw_logprob", "processed_logprob", "kept", "bad"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Verified:
    """What each of p sequences emits: `accepted` drafts and one token; 0 in the places after it.

    Attributes:
        tokens: int32 [p, g + 1].
        accepted: int32 [p], how many drafts were kept, 0..count.
        raw_logprob: float32 [p, g + 1], the token's log-prob under the target at temperature 1,
            before masks and filter.
        processed_logprob: float32 [p, g + 1], its log-prob in the target's processed
            distribution, also where it was drawn from a residual.
        kept: int32 [p, g + 1], how many tokens that distribution holds.
        bad: bool [p, g + 1], the row cannot be drawn from (see `Processed`): it ends the step
            with token 0, and its request must fail.
    """

    tokens: jax.Array
    accepted: jax.Array
    raw_logprob: jax.Array
    processed_logprob: jax.Array
    kept: jax.Array
    bad: jax.Array

    @property
    def emitted(self) -> jax.Array:
        """How many tokens each sequence emits, int32 [p]."""
        return self.accepted + np.int32(1)


def uniform(
    seed: jax.Array, position: jax.Array, purpose: Purpose, start: jax.Array | None = None
) -> jax.Array:
    """A uniform number in the open interval (0, 1) for each of n rows, float32 [n].

    (w + 1/2) 2^-32 in float32, at most 1 - 2^-24, with w word 0 of Philox4x32-10 under the seed
    as key and counter (0, purpose, position, start or 0): a word that Gumbel noise of the same
    purpose gives to token 0, so a purpose has use for one of the two only.

    Args:
        seed: uint32 [n, 2], low word first.
        position: int32 [n].
        purpose: which of the independent streams.
        start: int32 [n] or None, as in `gumbel_noise`.
    """
    place = position.astype(jnp.uint32)
    none = jnp.zeros_like(place)
    step = none if start is None else start.astype(jnp.uint32)
    counter = none, jnp.full_like(place, np.uint32(purpose)), place, step
    word = philox4x32((seed[:, 0], seed[:, 1]), counter)[0]
    value = (word.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return jnp.minimum(value, _BELOW_ONE)


def _each_row(rows: RowParams, width: int) -> RowParams:
    """The settings of all p * width rows; row j of a sequence produces position + j."""
    every = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), rows)
    place = jnp.tile(jnp.arange(width, dtype=jnp.int32), rows.position.shape[0])
    return replace(every, position=every.position + place)


def _emit(
    accepted: jax.Array,
    tokens: jax.Array,
    raw: jax.Array,
    processed: jax.Array,
    kept: jax.Array,
    bad: jax.Array,
) -> Verified:
    """The values [p, g + 1] of all places, cleared after the last emitted one."""
    emitted = jnp.arange(tokens.shape[1], dtype=jnp.int32) <= accepted[:, None]
    tokens, raw, processed, kept, bad = (
        jnp.where(emitted, x, jnp.zeros_like(x)) for x in (tokens, raw, processed, kept, bad)
    )
    return Verified(tokens, accepted, raw, processed, kept, bad)


def _verify_coupled(
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    rows: RowParams,
    allowed: jax.Array | None,
) -> Verified:
    """Draw every place as without drafts; a draft is kept while it is the token that was drawn."""
    p, width, vocab_size = logits.shape
    flat = None if allowed is None else allowed.reshape(-1, vocab_size)
    drawn = sample(logits.reshape(-1, vocab_size), _each_row(rows, width), flat)
    drawn = jax.tree.map(lambda x: x.reshape(p, width), drawn)
    accepted = leading((drawn.token[:, :-1] == drafts) & ~drawn.bad[:, :-1], count)
    return _emit(
        accepted, drawn.token, drawn.raw_logprob, drawn.processed_logprob, drawn.kept, drawn.bad
    )


def _verify_exact(
    rule: str,
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    draft_logprobs: jax.Array,
    rows: RowParams,
    allowed: jax.Array | None,
) -> Verified:
    """`rejection` and `block`.

    The token after the kept drafts is a shared draw where no draft was refused, so a sequence
    without drafts emits what it would emit anyway, and a REPLACEMENT draw elsewhere.
    """
    p, width, vocab_size = logits.shape
    each = _each_row(rows, width)
    law = processed_logprobs(
        logits.reshape(-1, vocab_size),
        *(each.temperature, each.top_p, each.top_k),
        None if allowed is None else allowed.reshape(-1, vocab_size),
    )
    target = law.logprobs.reshape(logits.shape)
    bad, kept = law.bad.reshape(p, width), law.kept.reshape(p, width)
    # Nothing can be kept on a bad row, so it is the last of those that count.
    offered = leading(~bad[:, :-1], count)
    if rule == "block":
        accept, start = accept_block, jnp.repeat(rows.position, width)
    else:
        # The uniforms of refused places stay unread, so they may come again in the next step.
        accept, start = accept_token_wise, None
    uniforms = uniform(each.seed, each.position, Purpose.ACCEPTANCE, start).reshape(p, width)
    verdict = accept(target, draft_logprobs, drafts, offered, uniforms[:, :-1])
    last = draw_token(
        verdict.logprobs,
        replace(rows, position=rows.position + verdict.accepted),
        purpose=jnp.where(
            verdict.replaces, np.uint32(Purpose.REPLACEMENT), np.uint32(Purpose.SHARED_DRAW)
        ),
    )
    last = jnp.where(of_token(bad, verdict.accepted), np.int32(0), last)
    place = jnp.arange(width, dtype=jnp.int32)
    before = jnp.pad(drafts, [(0, 0), (0, 1)])
    tokens = jnp.where(place == verdict.accepted[:, None], last[:, None], before)
    raw = raw_logprobs(logits.reshape(-1, vocab_size)).reshape(logits.shape)
    return _emit(
        verdict.accepted, tokens, of_token(raw, tokens), of_token(target, tokens), kept, bad
    )


def _verify_as_original(
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    draft_logprobs: jax.Array,
    rows: RowParams,
    allowed: jax.Array | None,
    forced: jax.Array | None,
) -> Verified:
    """The original engine's rule, on its position keys: the length before the step, row strides."""
    p, width, vocab_size = logits.shape
    g = width - 1
    each = jax.tree.map(lambda x: jnp.repeat(x, g, axis=0), rows)
    stride = np.int32(ROW_STRIDE)
    keys = jnp.tile(jnp.arange(g, dtype=jnp.int32) * stride, p)
    judged = verify_original(
        logits[:, :g].reshape(-1, vocab_size),
        draft_logprobs.reshape(-1, vocab_size),
        drafts.reshape(-1),
        *(each.temperature, each.top_p, each.top_k, each.seed, each.position + keys),
        None if allowed is None else allowed[:, :g].reshape(-1, vocab_size),
    )
    fresh = sample_original(
        of_row(logits, count),
        *(rows.temperature, rows.top_p, rows.top_k, rows.seed, rows.position + stride * count),
        jnp.zeros((p,), bool),
        None if allowed is None else of_row(allowed, count),
    )
    drawn = jax.tree.map(
        lambda x, y: jnp.where(
            jnp.arange(width, dtype=jnp.int32) == count[:, None],
            y[:, None],
            jnp.pad(x.reshape(p, g), [(0, 0), (0, 1)]),
        ),
        judged,
        fresh,
    )
    holds = drawn.accepted[:, :g]
    if forced is not None:
        # Its uniform may be 1, and then even a certain draft is refused.
        holds |= (forced[:, :g] >= 0) & (forced[:, :g] == drafts) & ~drawn.bad[:, :g]
    accepted = leading(holds, count)
    raw = raw_logprobs(logits.reshape(-1, vocab_size)).reshape(logits.shape)
    return _emit(
        accepted, drawn.token, of_token(raw, drawn.token), drawn.logprob, drawn.kept, drawn.bad
    )


def verify(
    rule: str,
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    draft_logprobs: jax.Array | None,
    rows: RowParams,
    allowed: jax.Array | None = None,
    forced: jax.Array | None = None,
) -> Verified:
    """Judge the drafts of p sequences by the target's logits and add one token of its own.

    A sequence's result is the same bits whatever stands beside it and behind its `count` drafts.

    Args:
        rule: `coupled`: draw every place with the noise of its position, as without drafts, and
            keep a draft while it is the token drawn; drafts of any origin will do.
            `rejection`: token-wise, keep while u q < p. `block`: judge the drafts together
            (`accept_block`). `original`: as DeepInfer 0.1.0, exact up to 5e-5.
        logits: float32 [p, g + 1, v]; row j is the target after j drafts.
        drafts: int32 [p, g]; -1 is never kept.
        count: int32 [p] in 0..g, how many drafts were offered. Whether a draft was offered must
            not depend on the draft itself, or `rejection` and `block` are biased.
        draft_logprobs: float32 [p, g, v], the processed log-probs that the drafts were drawn
            from (a point mass where they were greedy); None under `coupled`, which reads none.
        rows: of each sequence; `position` is that of the first token this step produces, so that
            the token of place j has position + j.
        allowed: bool [p, g + 1, v], tokens that may be drawn in each row (a grammar's mask after
            j drafts), or None for all.
        forced: int32 [p, g + 1], the token that each place must emit whatever the target says,
            -1 for none, or None. It takes the place of the mask: a draft that equals it is kept,
            any other is refused and replaced by it. Forced places come before free ones.

    Raises:
        ConfigError: an unknown rule.
    """
    check_rule(rule)
    if forced is not None:
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        free = jnp.bool_(True) if allowed is None else allowed
        allowed = jnp.where(forced[..., None] >= 0, ids == forced[..., None], free)
    # Where no draft can be offered, rejection and block draw as coupled does.
    if rule == "coupled" or (rule != "original" and drafts.shape[1] == 0):
        return _verify_coupled(logits, drafts, count, rows, allowed)
    assert draft_logprobs is not None, f"{rule} compares with the law of the drafts"
    if rule == "original":
        return _verify_as_original(logits, drafts, count, draft_logprobs, rows, allowed, forced)
    return _verify_exact(rule, logits, drafts, count, draft_logprobs, rows, allowed)
