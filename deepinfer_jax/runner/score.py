"""Log-probs of tokens that are already known: prompt rows scored against the token after them.

Logits are made for a few rows at a time, so that memory is bounded by that chunk and the
vocabulary, however long the prompt.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.model.params import Params
from deepinfer_jax.model.transformer import Network, unembed
from deepinfer_jax.sampling import sampler
from deepinfer_jax.sampling.sampler import RowParams

CHUNK = 64  # rows whose logits are alive at the same time


@flax.struct.dataclass
class PromptScores:
    """How likely the known token after each of n rows is; a row that is not scored holds zeros.

    Attributes:
        logprob: float32 [n], of the token.
        greedy: bool [n], the token is the argmax of the logits (lowest id on ties).
        bad: bool [n], the row's logits hold NaN or +inf; its other values mean nothing.
        top_ids, top_logprobs: [n, k], the likeliest tokens.
    """

    logprob: jax.Array
    greedy: jax.Array
    bad: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def score_rows(
    params: Params,
    hidden: jax.Array,
    target: jax.Array,
    draw: RowParams,
    *,
    net: Network,
    processed: bool,
    top: int,
    chunk: int = CHUNK,
) -> PromptScores:
    """Score n rows, `chunk` at a time; a chunk without a scored row is not computed.

    Args:
        params: the network.
        hidden: [n, d], before the final norm.
        target: int32 [n], the token after each row, -1 for a row that is not scored.
        draw: of each row; its temperature and filter shape the processed distribution.
        net: configuration and arithmetic.
        processed: describe the distribution that draws would come from, instead of the raw one.
        top: how many likeliest tokens to report.
        chunk: rows whose logits are alive at the same time.
    """
    n = hidden.shape[0]
    chunk = min(chunk, n)
    rows = (hidden, target, draw.temperature, draw.top_p, draw.top_k)
    short = -n % chunk
    padded = [jnp.pad(x, [(0, short)] + [(0, 0)] * (x.ndim - 1)) for x in rows]
    padded[1] = padded[1].at[n:].set(-1)

    def scored(given: Any) -> PromptScores:
        hidden, target, temperature, top_p, top_k = given
        logits = unembed(params, hidden, net)
        _, bad = sampler.clean_rows(logits, None)
        if processed:
            table = sampler.processed_logprobs(logits, temperature, top_p, top_k).logprobs
        else:
            table = sampler.raw_logprobs(logits)
        known = target >= 0
        at = jnp.maximum(target, 0)
        logprob = jnp.take_along_axis(table, at[:, None], -1)[:, 0]
        ids, values = sampler.top_logprobs(table, top)
        return PromptScores(
            logprob=jnp.where(known, logprob, 0),
            greedy=known & (jnp.argmax(logits, -1).astype(jnp.int32) == target),
            bad=known & bad,
            top_ids=jnp.where(known[:, None], ids, 0),
            top_logprobs=jnp.where(known[:, None], values, 0),
        )

    def nothing(given: Any) -> PromptScores:
        empty = jnp.zeros(chunk, bool)
        values = jnp.zeros((chunk, top), jnp.float32)
        return PromptScores(
            jnp.zeros(chunk, jnp.float32), empty, empty, values.astype(jnp.int32), values
        )

    def one(given: Any) -> PromptScores:
        return jax.lax.cond(jnp.any(given[1] >= 0), scored, nothing, given)

    made = jax.lax.map(one, [x.reshape(-1, chunk, *x.shape[1:]) for x in padded])
    return jax.tree.map(lambda x: x.reshape(n + short, *x.shape[2:])[:n], made)


def by_row(scores: PromptScores, index: jax.Array, rows: int) -> PromptScores:
    """Scores of m kept rows at their places `index` int32 [m] among `rows`; others are zeros.

    A place outside of them is dropped.
    """
    return jax.tree.map(
        lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype).at[index].set(x, mode="drop"), scores
    )
