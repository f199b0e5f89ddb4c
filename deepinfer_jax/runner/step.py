"""One step of the engine as a pure function: a plan in, one drawn token per sequence out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.cache import Rows, init_cache
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.transformer import Network, forward, unembed
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import (
    EngineState,
    Scheduled,
    StepInput,
    committed,
    derive,
    with_pages,
)
from deepinfer_jax.runner.score import PromptScores, by_row, score_rows
from deepinfer_jax.sampling import sampler
from deepinfer_jax.sampling.original import sample_original
from deepinfer_jax.sampling.sampler import Draw, RowParams


@dataclass(frozen=True)
class StepOptions:
    """What a step program is built for besides its sizes; hashable.

    Attributes:
        draw: `stable` or `original`, the two samplers.
        logprobs: `raw` or `processed`, which distribution the top log-probs describe.
        top: how many top log-probs to return.
        prompt: how many top log-probs of scored prompt rows; None: no row is scored.
        truncate, first_exact: bounded replay of the decoder, see `runner.schedule.derive`; `mask`
            runs all rows, `compact` the kept ones where the bucket has fewer decoder rows.
    """

    draw: Literal["stable", "original"] = "stable"
    logprobs: Literal["raw", "processed"] = "raw"
    top: int = 0
    prompt: int | None = None
    truncate: Literal["off", "mask", "compact"] = "off"
    first_exact: bool = False


@flax.struct.dataclass
class StepOutput:
    """What comes back, for each of p parts; a part that draws nothing holds nothing of use.

    Attributes:
        draw: token, log-probs and flags, [p] each.
        top_ids, top_logprobs: [p, count], the likeliest tokens; count may be 0.
        ended: bool [p], the token ended the sequence as far as the device can tell.
        prompt: of the step's rows, for a program that scores them, else None.
    """

    draw: Draw
    top_ids: jax.Array
    top_logprobs: jax.Array
    ended: jax.Array
    prompt: PromptScores | None = None


def output_structure(options: StepOptions) -> Any:
    """The container of a step's output, leaves left out: known without tracing."""
    none: Any = 0
    scores = None if options.prompt is None else PromptScores(none, none, none, none, none)
    return StepOutput(Draw(none, none, none, none, none), none, none, none, scores)


def step(
    params: Params,
    state: EngineState,
    inputs: StepInput,
    *,
    net: Network,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[EngineState, StepOutput]:
    """Run the planned rows, draw a token for each part that draws.

    Args:
        params: the network.
        state: of all sequences; donated by the compiled step.
        inputs: the host's plan.
        net: configuration, arithmetic and kernels.
        bucket: sizes of the plan.
        options: what the program is built for.
    """
    cache = with_pages(state.cache, inputs, bucket)
    plan = derive(
        state, inputs, bucket, truncate=options.truncate != "off", first_exact=options.first_exact
    )
    out = forward(params, cache, plan.rows, inputs.memory, kept=plan.kept, net=net)
    with jax.named_scope("head"):
        logits = unembed(params, out.hidden[plan.take], net)
    with jax.named_scope("sample"):
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
        allowed = (plan.forced[:, None] < 0) | (ids == plan.forced[:, None])
        draw = sampler.sample if options.draw == "stable" else _original_draw
        drawn = draw(logits, plan.draw, allowed)
        top_ids, top = _top(logits, plan.draw, allowed, options)
    scores = None
    if options.prompt is not None:
        with jax.named_scope("score"):
            scores = _scores(params, out.hidden, plan, net, bucket, options, options.prompt)
    state, ended = committed(state, out.cache, plan, drawn.token, drawn.bad)
    return state, StepOutput(drawn, top_ids, top, ended, scores)


def _scores(
    params: Params,
    hidden: jax.Array,
    plan: Scheduled,
    net: Network,
    bucket: Bucket,
    options: StepOptions,
    top: int,
) -> PromptScores:
    target, owner, index = plan.target, plan.owner, None
    if plan.kept is not None and plan.kept.index is not None:
        index = plan.kept.index
        here = plan.kept.rows.position >= 0  # padding may point at a row that counts
        target, owner = jnp.where(here, target[index], -1), owner[index]
    draw = jax.tree.map(lambda x: x[owner], plan.draw)
    processed = options.logprobs == "processed"
    scores = score_rows(params, hidden, target, draw, net=net, processed=processed, top=top)
    if index is None:
        return scores
    return by_row(scores, jnp.where(target < 0, bucket.rows, index), bucket.rows)


def _top(
    logits: jax.Array, draw: RowParams, allowed: jax.Array, options: StepOptions
) -> tuple[jax.Array, jax.Array]:
    if options.logprobs == "raw":
        table = sampler.raw_logprobs(logits)
    else:
        table = sampler.processed_logprobs(
            logits, draw.temperature, draw.top_p, draw.top_k, allowed
        ).logprobs
    return sampler.top_logprobs(table, options.top)


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


def init_state(
    net: Network, *, slots: int, positions: int, pages: int | None = None
) -> EngineState:
    """A state of `slots` sequences of at most `positions` tokens; `pages` as in `init_cache`."""
    cache = init_cache(net.config, net.arithmetic, slots=slots, positions=positions, pages=pages)
    return EngineState(
        cache=cache,
        token=jnp.zeros(slots, jnp.int32),
        length=jnp.zeros(slots, jnp.int32),
        done=jnp.zeros(slots, bool),
    )


def pack_rows(parts: Sequence[tuple[np.ndarray, int, int]], rows: int) -> Rows:
    """`Rows` of NumPy arrays from (token ids, first position, slot) parts, padded to `rows`."""
    columns: Any = np.zeros((7, rows), np.int32)
    ids, position, slot, start, stop, floor, write_from = columns
    position -= 1
    at = 0
    for tokens, first, place in parts:
        n = len(tokens)
        here = slice(at, at + n)
        ids[here], slot[here] = tokens, place
        position[here] = np.arange(first, first + n)
        start[here], stop[here] = first, first + n
        at += n
    return Rows(ids, position, slot, start, stop, floor, write_from)
