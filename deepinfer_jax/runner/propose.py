"""Drafts for the tokens that come next, proposed in the step that drew the last one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model.draft import block, context_keys, main_hidden, markov, write_context
from deepinfer_jax.model.params import Params
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.runner.schedule import Drafts, Emitted, EngineState, Scheduled
from deepinfer_jax.sampling.draft import draft_token
from deepinfer_jax.sampling.lengths import calibrated
from deepinfer_jax.sampling.sampler import RowParams


def propose(
    params: Params,
    state: EngineState,
    plan: Scheduled,
    emitted: Emitted,
    taps: jax.Array,
    *,
    net: Network,
    rule: str,
    temperature: tuple[float, ...],
    wanted: jax.Array | None = None,
) -> EngineState:
    """The state with new drafts of the parts that emitted a token and go on.

    The keys of all rows of the step go into the draft rings, those of drafts that were not kept
    too: nothing reads them before they are written again.

    Args:
        params: the network with its drafter.
        state: as `committed` left it.
        plan: the step. emitted: what it gave away.
        taps: [taps, m, d], of the rows that ran through the decoder's layers.
        net: configuration, arithmetic and kernels.
        rule: which verification will judge the drafts.
        temperature: of the confidence of each of g drafts.
        wanted: bool [], False leaves them without drafts; None: wanted.
    """
    drafter, drafts = params.drafter, state.drafts
    assert drafter is not None and drafts is not None and state.cache.draft is not None
    rows = plan.rows if plan.kept is None else plan.kept.rows
    main = main_hidden(drafter, taps, rows.used, net=net)
    keys = context_keys(params, drafter, main, rows, net=net)
    rings = write_context(state.cache.draft, keys, rows)

    count = drafts.token.shape[1]
    goes_on = (emitted.count > 0) & ~emitted.ended
    slot = jnp.where(goes_on, plan.slot, -1)
    anchor = state.token[jnp.maximum(slot, 0)]
    position = jnp.where(goes_on, state.length[jnp.maximum(slot, 0)], -1)
    own: RowParams = jax.tree.map(lambda x: x[plan.at[:, 0]], plan.draw)
    numbers = jnp.arange(count, dtype=jnp.int32)

    def place(previous: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
        number, z, base = at
        logits, confidence = markov(drafter, z, base, previous, net=net)
        drawn = replace(own, position=position + 1 + number)
        token, logprobs = draft_token(logits, drawn, rule=rule, place=number)
        return token, (token, confidence, logprobs)

    def drafted() -> Drafts:
        z, base = block(params, drafter, rings, anchor, position, slot, plan.floor, net=net)
        each = numbers, jnp.moveaxis(z, 1, 0)[:count], jnp.moveaxis(base, 1, 0)[:count]
        _, (token, confidence, logprobs) = jax.lax.scan(place, anchor, each)
        sure = calibrated(jnp.moveaxis(confidence, 0, 1), jnp.asarray(temperature, np.float32))
        law = None if drafts.logprobs is None else jnp.moveaxis(logprobs, 0, 1)
        return Drafts(jnp.moveaxis(token, 0, 1), sure, law)

    def none() -> Drafts:
        # What was proposed before stood at other positions.
        shapes = jax.tree.map(lambda x: jnp.zeros((slot.shape[0], *x.shape[1:]), x.dtype), drafts)
        return replace(shapes, token=shapes.token - 1)

    made = drafted() if wanted is None else jax.lax.cond(wanted, drafted, none)
    at = jnp.where(goes_on, plan.slot, jnp.iinfo(jnp.int32).max)
    return replace(
        state,
        cache=replace(state.cache, draft=rings),
        drafts=jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), drafts, made),
    )
