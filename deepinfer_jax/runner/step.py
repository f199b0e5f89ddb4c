"""One step of the engine as a pure function: a plan in, one drawn token per sequence out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.cache import BACKTRACK, Rows, init_cache
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.transformer import Network, forward, unembed
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.propose import propose
from deepinfer_jax.runner.schedule import (
    Drafts,
    EngineState,
    Scheduled,
    StepInput,
    committed,
    derive,
    emit,
    with_pages,
)
from deepinfer_jax.runner.score import PromptScores, by_row, score_rows
from deepinfer_jax.sampling import sampler
from deepinfer_jax.sampling.accept import leading
from deepinfer_jax.sampling.original import sample_original
from deepinfer_jax.sampling.sampler import Draw, RowParams
from deepinfer_jax.sampling.verify import verify


@dataclass(frozen=True)
class StepOptions:
    """What a step program is built for besides its sizes; hashable.

    Attributes:
        draw: `stable` or `original`, the two samplers.
        logprobs: `raw` or `processed`, which distribution the top log-probs describe.
        top: how many top log-probs to return.
        prompt: how many top log-probs of scored prompt rows; None: no row is scored.
        verification: which drafts are kept: `coupled`, `rejection` or `block`.
        confidence_temperature: of the confidence of each draft.
        varlen: how many drafts of a part are verified follows their confidence.
        truncate, first_exact: bounded replay of the decoder, see `runner.schedule.derive`; `mask`
            runs all rows, `compact` the kept ones where the bucket has fewer decoder rows.
    """

    draw: Literal["stable", "original"] = "stable"
    logprobs: Literal["raw", "processed"] = "raw"
    top: int = 0
    prompt: int | None = None
    verification: Literal["coupled", "rejection", "block"] = "coupled"
    confidence_temperature: tuple[float, ...] = ()
    varlen: bool = False
    truncate: Literal["off", "mask", "compact"] = "off"
    first_exact: bool = False

    @property
    def rule(self) -> str:
        """Which drafts are kept. The original's draws have the original's rule.

        Its draws turn on the last bit of a logit, so that a step of other rows may draw another
        token, and coupling would promise nothing.
        """
        return "original" if self.draw == "original" else self.verification


@flax.struct.dataclass
class StepOutput:
    """What comes back, for each of p parts with w tokens at most.

    Attributes:
        draw: token, log-probs and flags, [p, w] each.
        top_ids, top_logprobs: [p, w, count], the likeliest tokens; count may be 0.
        emitted: int32 [p], how many of the tokens count; the others hold nothing of use.
        confidence: float32 [p, g], of the drafts that were proposed for the next step; g may be 0.
        offered, accepted: int32 [p], drafts that were verified, and those that were kept.
        ended: bool [p], the last token ended the sequence as far as the device can tell.
        prompt: of the step's rows, for a program that scores them, else None.
    """

    draw: Draw
    top_ids: jax.Array
    top_logprobs: jax.Array
    emitted: jax.Array
    confidence: jax.Array
    offered: jax.Array
    accepted: jax.Array
    ended: jax.Array
    prompt: PromptScores | None = None


def output_structure(options: StepOptions) -> Any:
    """The container of a step's output, leaves left out: known without tracing."""
    none: Any = 0
    scores = None if options.prompt is None else PromptScores(none, none, none, none, none)
    draw = Draw(none, none, none, none, none)
    return StepOutput(draw, none, none, none, none, none, none, none, scores)


def step(
    params: Params,
    state: EngineState,
    inputs: StepInput,
    *,
    net: Network,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[EngineState, StepOutput]:
    """Run the planned rows, draw for each part that draws, verify drafts and propose new ones.

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
        state,
        inputs,
        bucket,
        truncate=options.truncate != "off",
        first_exact=options.first_exact,
        varlen=options.varlen,
    )
    out = forward(params, cache, plan.rows, inputs.memory, kept=plan.kept, net=net)
    with jax.named_scope("head"):
        logits = unembed(params, out.hidden[plan.take], net)
    with jax.named_scope("sample"):
        drawn, top, accepted = _drawn(logits, state.drafts, plan, bucket, options)
        emitted = emit(plan, drawn.token, drawn.bad, accepted)
    scores = None
    if options.prompt is not None:
        with jax.named_scope("score"):
            scores = _scores(params, out.hidden, plan, net, bucket, options, options.prompt)
    state = committed(state, out.cache, plan, drawn.token, emitted)
    if state.drafts is not None:
        with jax.named_scope("draft"):
            state = propose(
                params,
                state,
                plan,
                emitted,
                out.taps,
                net=net,
                rule=options.rule,
                temperature=options.confidence_temperature,
                wanted=plan.proposes if options.varlen else None,
            )
    confidence = jnp.zeros((bucket.parts, 0), jnp.float32)
    if state.drafts is not None:
        confidence = state.drafts.confidence[jnp.where(plan.draws, plan.slot, 0)]
    return state, StepOutput(
        draw=drawn,
        top_ids=top[0],
        top_logprobs=top[1],
        emitted=emitted.count,
        confidence=confidence,
        offered=emitted.offered,
        accepted=emitted.accepted,
        ended=emitted.ended,
        prompt=scores,
    )


def _drawn(
    logits: jax.Array,
    drafts: Drafts | None,
    plan: Scheduled,
    bucket: Bucket,
    options: StepOptions,
) -> tuple[Draw, tuple[jax.Array, jax.Array], jax.Array]:
    """What each part draws, [p, w], its likeliest tokens, and int32 [p], how many drafts it keeps.

    `logits` float32 [d, v] are those of the rows after which a token is drawn.
    """
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    allowed = (plan.forced[:, None] < 0) | (ids == plan.forced[:, None])
    top = jax.tree.map(lambda x: x[plan.at], _top(logits, plan.draw, allowed, options))
    if options.rule == "coupled" or not bucket.drafts:
        # As many draws as rows: a part with fewer drafts than others costs no more.
        draw = sampler.sample if options.draw == "stable" else _original_draw
        drawn = jax.tree.map(lambda x: x[plan.at], draw(logits, plan.draw, allowed))
        return drawn, top, leading(drawn.token[:, :-1] == plan.drafts, plan.drawn - 1)
    assert drafts is not None and drafts.logprobs is not None
    found = verify(
        options.rule,
        logits[plan.at],
        plan.drafts,
        plan.drawn - 1,
        drafts.logprobs[jnp.where(plan.draws, plan.slot, 0), : bucket.drafts],
        jax.tree.map(lambda x: x[plan.at[:, 0]], plan.draw),
        forced=plan.forced[plan.at],
    )
    drawn = Draw(found.tokens, found.raw_logprob, found.processed_logprob, found.kept, found.bad)
    return drawn, top, found.accepted


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
    # A part that has rows to score draws once.
    draw = jax.tree.map(lambda x: x[plan.at[owner, 0]], plan.draw)
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
    net: Network,
    *,
    slots: int,
    positions: int,
    pages: int | None = None,
    drafts: int = 0,
    compared: bool = False,
    backtrack: int = BACKTRACK,
) -> EngineState:
    """A state of `slots` sequences of at most `positions` tokens.

    `pages` and `backtrack` are those of `init_cache`.

    `drafts` is how many tokens a sequence can have verified in a step; with `compared`, what they
    were drawn from is kept too.
    """
    cache = init_cache(
        net.config,
        net.arithmetic,
        slots=slots,
        positions=positions,
        pages=pages,
        drafter=net.drafter,
        backtrack=backtrack,
    )
    law = (slots, drafts, net.config.vocab_size)
    return EngineState(
        cache=cache,
        token=jnp.zeros(slots, jnp.int32),
        length=jnp.zeros(slots, jnp.int32),
        done=jnp.zeros(slots, bool),
        drafts=None
        if not drafts
        else Drafts(
            token=jnp.full((slots, drafts), -1, jnp.int32),
            confidence=jnp.zeros((slots, drafts), jnp.float32),
            logprobs=jnp.zeros(law, jnp.float32) if compared else None,
        ),
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
