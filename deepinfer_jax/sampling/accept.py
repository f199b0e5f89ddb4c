"""Which drafts are kept and what the token after them is drawn from: the rules without their dice.

Everything is computed in the float type it is given, so that the law of a rule can be enumerated
in float64 by the very code that runs in float32. A step produces places j = 0..g: row j of the
target tells the law of place j, and draft j (0-based) is a candidate for place j.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.sampling.sampler import tree_sum

Rule = Literal["coupled", "rejection", "block", "original"]

# Below this a residual is rounding noise of two equal laws.
SMALLEST_RESIDUAL = 1e-8


class Verdict(NamedTuple):
    """What became of the drafts of p sequences.

    Attributes:
        accepted: int32 [p], how many drafts are kept.
        replaces: bool [p], the next token stands in for a draft that was offered and refused.
        logprobs: float [p, v], log-weights of the next token, not always normalised.
    """

    accepted: jax.Array
    replaces: jax.Array
    logprobs: jax.Array


def check_rule(rule: str) -> None:
    """Refuse a rule of verification that does not exist.

    Raises:
        ConfigError: it is none of `coupled`, `rejection`, `block` and `original`.
    """
    known = get_args(Rule)
    if rule not in known:
        raise ConfigError(
            f"Verification rule {rule!r} is unknown.",
            f"There are {len(known)} of them: {', '.join(known)}.",
            "Name one of those; coupled emits the same tokens as without drafts.",
        )


def leading(holds: jax.Array, count: jax.Array) -> jax.Array:
    """How many of the first `count` int32 [p] places of bool [p, g] hold without a gap, int32."""
    place = jnp.arange(holds.shape[1], dtype=jnp.int32)
    unbroken = jnp.cumprod((holds & (place < count[:, None])).astype(jnp.int32), axis=1)
    return jnp.sum(unbroken, axis=1, dtype=jnp.int32)


def of_row(values: jax.Array, row: jax.Array) -> jax.Array:
    """Row `row` int32 [p] of each sequence's [p, rows, v]: [p, v]."""
    return jnp.take_along_axis(values, row[:, None, None], axis=1)[:, 0]


def of_token(values: jax.Array, token: jax.Array) -> jax.Array:
    """The values of [..., v] at token int32 [...]: [...]."""
    return jnp.take_along_axis(values, token[..., None], axis=-1)[..., 0]


def _probs_of_drafts(
    target: jax.Array, draft: jax.Array, drafts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The probability [p, g] of each draft under the target and under its own law."""
    known = jnp.maximum(drafts, 0)
    p = jnp.exp(of_token(target[:, :-1], known))
    # A draft of -1 (a grammar refused it) is impossible for the target.
    return jnp.where(drafts >= 0, p, jnp.zeros_like(p)), jnp.exp(of_token(draft, known))


def _residual(scale: jax.Array, target: jax.Array, draft: jax.Array) -> jax.Array:
    """max(scale p - q, 0) of log-probs [..., v] and a scale [...]."""
    return jnp.maximum(scale[..., None] * jnp.exp(target) - jnp.exp(draft), 0.0)


def _verdict(
    target: jax.Array, draft: jax.Array, accepted: jax.Array, count: jax.Array, scale: jax.Array
) -> Verdict:
    replaces = accepted < count
    plain = of_row(target, accepted)
    # Of a draft that was never offered nothing is subtracted.
    refused = of_row(draft, jnp.minimum(accepted, draft.shape[1] - 1))
    weights = _residual(scale, plain, refused)
    corrects = replaces & (tree_sum(weights) > SMALLEST_RESIDUAL)
    return Verdict(accepted, replaces, jnp.where(corrects[:, None], jnp.log(weights), plain))


def accept_token_wise(
    target: jax.Array, draft: jax.Array, drafts: jax.Array, count: jax.Array, uniforms: jax.Array
) -> Verdict:
    """Keep drafts while u q < p, then draw from p, or from max(p - q, 0) after a refusal.

    Exact whenever the offer of a draft depends on nothing that contains it (Leviathan et al.,
    2023; Chen et al., 2023).

    Args:
        target: float [p, g + 1, v], log-probs of each place after all processors.
        draft: float [p, g, v], log-probs that each draft was drawn from; g >= 1.
        drafts: int32 [p, g]; -1 is always refused.
        count: int32 [p] in 0..g, how many were offered; what lies beyond is not read.
        uniforms: float [p, g] in (0, 1), one for each draft.
    """
    p, q = _probs_of_drafts(target, draft, drafts)
    accepted = leading(uniforms * q < p, count)
    return _verdict(target, draft, accepted, count, jnp.ones_like(target[:, 0, 0]))


def accept_block(
    target: jax.Array, draft: jax.Array, drafts: jax.Array, count: jax.Array, uniforms: jax.Array
) -> Verdict:
    """Judge the drafts together: keep the longest prefix i with u_i <= h_i (Sun et al., 2024).

    With l = count, s_0 = 1 and s_i = min(1, s_{i-1} p(x_i) / q(x_i)), h_l = s_l and, for i < l,
    h_i = m_i / (m_i + 1 - s_i) with m_i the sum of max(s_i p_i - q_i, 0); 1 if that is 0 / 0.
    After l kept drafts the next token is drawn from p_l, else from max(s_n p_n - q_n, 0). Keeps
    at least as many drafts as `accept_token_wise` on average. All drafts and uniforms of a step
    decide together, so none of its randomness, used or not, may occur in another step.

    Args:
        target: float [p, g + 1, v], as in `accept_token_wise`, and so are the others.
        draft: float [p, g, v].
        drafts: int32 [p, g].
        count: int32 [p].
        uniforms: float [p, g], one for each prefix length 1..g.
    """
    p, q = _probs_of_drafts(target, draft, drafts)
    # A token cannot be drawn where its q is 0; the bound only keeps 0 / 0 out of other places.
    q = jnp.maximum(q, jnp.finfo(q.dtype).tiny)
    width = drafts.shape[1]
    scales = [jnp.ones_like(p[:, 0])]
    for place in range(width):
        scales.append(jnp.minimum(scales[-1] * p[:, place] / q[:, place], 1.0))
    scale = jnp.stack(scales, axis=1)
    mass = tree_sum(_residual(scale[:, 1:-1], target[:, 1:-1], draft[:, 1:]))
    mass = jnp.pad(mass, [(0, 0), (0, 1)])  # all g kept: always the last of those offered
    below = mass + (1.0 - scale[:, 1:])
    chance = jnp.where(below > 0.0, mass / jnp.where(below > 0.0, below, 1.0), 1.0)
    length = jnp.arange(1, width + 1, dtype=jnp.int32)
    chance = jnp.where(length == count[:, None], scale[:, 1:], chance)
    kept = (uniforms <= chance) & (length <= count[:, None])
    accepted = jnp.max(jnp.where(kept, length, 0), axis=1)
    return _verdict(target, draft, accepted, count, of_token(scale, accepted))
