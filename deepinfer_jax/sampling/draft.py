"""The draw of drafts: the settings of the target, and the noise that the rule asks for."""

import jax
import jax.numpy as jnp

from deepinfer_jax.sampling.accept import check_rule
from deepinfer_jax.sampling.original import original_logprobs, sample_original
from deepinfer_jax.sampling.sampler import (
    Purpose,
    RowParams,
    draw_token,
    processed_logprobs,
    sample,
)


def draft_token(
    logits: jax.Array, rows: RowParams, *, rule: str, place: jax.Array | int
) -> tuple[jax.Array, jax.Array | None]:
    """Draw one draft per row, with the target's own temperature, top-p and top-k.

    Under `coupled` its noise is that of the target at the same position. Under `rejection` and
    `block` it is noise of purpose DRAFT that also depends on where the step started: `block`
    (and a budget that looks at earlier drafts) decides by drafts that are not emitted, so drafts
    of a later step at the same position must be independent of them.

    Args:
        logits: float32 [n, v] of the drafter. A row with NaN, +inf or all -inf draws as if all
            logits were 0, so that its draft may be useless and the rules stay exact (under
            `coupled`, which is exact for any draft, and `original` it gives token 0).
        rows: of each draft; `position` is that of the token it is a draft for.
        rule: the rule of verification that will judge it.
        place: int32 scalar or [n], how many drafts of the same step come before it; where the
            step started is position - place.

    Returns:
        The tokens int32 [n], and the log-probs float32 [n, v] that they were drawn from, or None
        where the rule has no use for them.

    Raises:
        ConfigError: an unknown rule.
    """
    check_rule(rule)
    if rule == "coupled":
        return sample(logits, rows).token, None
    settings = rows.temperature, rows.top_p, rows.top_k
    if rule == "original":
        drafts = jnp.ones(rows.position.shape, bool)
        drawn = sample_original(logits, *settings, rows.seed, rows.position, drafts)
        return drawn.token, original_logprobs(logits, *settings).logprobs
    logprobs = processed_logprobs(logits, *settings).logprobs
    start = rows.position - jnp.asarray(place, jnp.int32)
    return draw_token(logprobs, rows, purpose=Purpose.DRAFT, start=start), logprobs
