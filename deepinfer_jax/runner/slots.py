"""Moving a sequence between slots, and between the device and the host: pure functions.

What grows with a sequence is moved page by page, a fixed number of pages a call, so that one
program serves all lengths; what does not grow is its slot's.
"""

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.runner.schedule import EngineState

PAGES = 8  # of one call
_NOWHERE = jnp.iinfo(jnp.int32).max  # an index that a scatter drops


@flax.struct.dataclass
class Held:
    """What one slot and some pages hold, without their numbers.

    Attributes:
        window: [layers, ring, k]. draft: [stages, ring, k], or None. raw: a source's raw rows
            [ring, 2 k], or None.
        history: int32 [ring]. token, length: int32.
        pages: per source (entries, index keys), [PAGES, ...] each.
    """

    window: Any
    draft: Any
    raw: tuple[Any, ...]
    history: jax.Array
    token: jax.Array
    length: jax.Array
    pages: tuple[Any, ...]


def take(state: EngineState, slot: jax.Array, pages: jax.Array) -> Held:
    """The slot's state and `pages` int32 [PAGES]; numbers below 0 give what is of no use."""
    cache = state.cache
    at = jnp.maximum(pages, 0)
    return Held(
        window=cache.window[:, slot],
        draft=None if cache.draft is None else cache.draft[:, slot],
        raw=tuple(None if s.raw is None else s.raw[slot] for s in cache.sources),
        history=cache.history[slot],
        token=state.token[slot],
        length=state.length[slot],
        pages=tuple(
            jax.tree.map(lambda x: x[at], (s.entries, s.index_keys)) for s in cache.sources
        ),
    )


def put(state: EngineState, held: Held, slot: jax.Array, pages: jax.Array) -> EngineState:
    """The state with `held` written to a slot and to `pages` int32 [PAGES]; below 0: nowhere.

    The slot is alive after it, whatever it was.
    """
    cache = state.cache
    at = jnp.where(pages < 0, _NOWHERE, pages)
    sources = []
    for source, raw, parts in zip(cache.sources, held.raw, held.pages, strict=True):
        entries, keys = jax.tree.map(
            lambda x, new: x.at[at].set(new, mode="drop"),
            (source.entries, source.index_keys),
            parts,
        )
        if raw is not None:
            assert source.raw is not None
            raw = source.raw.at[slot].set(raw)
        sources.append(replace(source, entries=entries, index_keys=keys, raw=raw))
    window, draft = jax.tree.map(
        lambda x, new: x.at[:, slot].set(new),
        (cache.window, cache.draft),
        (held.window, held.draft),
    )
    drafts = state.drafts
    if drafts is not None:  # those of the slot were another sequence's
        drafts = replace(drafts, token=drafts.token.at[slot].set(-1))
    return replace(
        state,
        cache=replace(
            cache,
            window=window,
            draft=draft,
            sources=tuple(sources),
            history=cache.history.at[slot].set(held.history),
        ),
        token=state.token.at[slot].set(held.token),
        length=state.length.at[slot].set(held.length),
        done=state.done.at[slot].set(False),
        drafts=drafts,
    )
