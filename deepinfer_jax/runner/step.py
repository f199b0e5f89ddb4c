"""One step of the engine as a pure function: rows in, one drawn token per taken row out."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.cache import Cache, Rows, init_cache
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.transformer import Network, forward, unembed
from deepinfer_jax.sampling import sampler
from deepinfer_jax.sampling.original import sample_original
from deepinfer_jax.sampling.sampler import Draw, RowParams

SAMPLERS = ("stable", "original")


@flax.struct.dataclass
class StepInput:
    """What the host sends for one step.

    Attributes:
        rows: the tokens to run, padded to the bucket.
        take: int32 [m], rows whose next token is drawn.
        draw: how each of the m tokens is drawn.
        allowed: bool [m, v], or None when no row has a mask.
        memory: looked-up Engram rows per Engram layer, when the tables are not on the device.
    """

    rows: Rows
    take: jax.Array
    draw: RowParams
    allowed: jax.Array | None = None
    memory: tuple[jax.Array, ...] | None = None


@flax.struct.dataclass
class StepOutput:
    """What comes back.

    Attributes:
        draw: token, log-probs and flags, [m] each.
        top_ids, top_logprobs: [m, count], the likeliest tokens; count may be 0.
    """

    draw: Draw
    top_ids: jax.Array
    top_logprobs: jax.Array


# The container of a step's output, leaves left out: known without tracing.
OUTPUT_STRUCTURE = StepOutput(Draw(0, 0, 0, 0, 0), 0, 0)  # type: ignore[arg-type]


def step(
    params: Params,
    cache: Cache,
    inputs: StepInput,
    *,
    net: Network,
    draw: str = "stable",
    logprobs: str = "raw",
    top: int = 0,
) -> tuple[Cache, StepOutput]:
    """Run the rows, draw a token for each taken row.

    Args:
        params: the network.
        cache: the slots' state; donated by the compiled step.
        inputs: rows and how to draw.
        net: configuration, arithmetic and kernels.
        draw: `stable` or `original`, the two samplers.
        logprobs: `raw` or `processed`, which distribution the top log-probs describe.
        top: how many top log-probs to return.
    """
    out = forward(params, cache, inputs.rows, inputs.memory, net=net)
    with jax.named_scope("head"):
        logits = unembed(params, out.hidden[inputs.take], net)
    with jax.named_scope("sample"):
        if draw == "stable":
            drawn = sampler.sample(logits, inputs.draw, inputs.allowed)
        elif draw == "original":
            drawn = _original_draw(logits, inputs.draw, inputs.allowed)
        else:
            raise ConfigError(
                f"There is no sampler {draw!r}.",
                f"The samplers are {', '.join(SAMPLERS)}.",
                "Set engine.sampler to one of them.",
            )
        if top == 0:
            m = inputs.take.shape[0]
            ids, values = jnp.zeros((m, 0), jnp.int32), jnp.zeros((m, 0), jnp.float32)
        else:
            if logprobs == "raw":
                table = sampler.raw_logprobs(logits)
            else:
                d = inputs.draw
                table = sampler.processed_logprobs(
                    logits, d.temperature, d.top_p, d.top_k, inputs.allowed
                ).logprobs
            ids, values = sampler.top_logprobs(table, top)
    return out.cache, StepOutput(drawn, ids, values)


def _original_draw(logits: jax.Array, rows: RowParams, allowed: jax.Array | None) -> Draw:
    """The original engine's draw; a row's position key is its absolute position."""
    drafts = jnp.zeros(rows.position.shape, bool)
    out = sample_original(
        logits,
        rows.temperature,
        rows.top_p,
        rows.top_k,
        rows.seed,
        rows.position,
        drafts,
        allowed,
    )
    raw = jnp.take_along_axis(sampler.raw_logprobs(logits), out.token[:, None], -1)[:, 0]
    return Draw(out.token, raw, out.logprob, out.kept, out.bad)


def init_state(net: Network, *, slots: int, positions: int) -> Cache:
    """Empty caches for `slots` sequences of at most `positions` tokens."""
    even = positions + positions % 2  # a whole number of ratio-2 groups
    return init_cache(net.config, net.arithmetic, slots=slots, positions=even)


def pack_rows(parts: Sequence[tuple[np.ndarray, int, int]], rows: int) -> Rows:
    """`Rows` of NumPy arrays from (token ids, first position, slot) parts, padded to `rows`."""
    columns: Any = np.zeros((5, rows), np.int32)
    ids, position, slot, start, stop = columns
    position -= 1
    at = 0
    for tokens, first, place in parts:
        n = len(tokens)
        here = slice(at, at + n)
        ids[here], slot[here] = tokens, place
        position[here] = np.arange(first, first + n)
        start[here], stop[here] = first, first + n
        at += n
    return Rows(ids, position, slot, start, stop)
