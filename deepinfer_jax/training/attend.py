"""Window and compressed attention as one softmax, with a hand-written gradient.

Keys are also values. Probabilities are kept in the compute dtype for the backward pass; scores and
softmax statistics are float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

_HIDDEN = -1e30  # finite, so that a row without keys leaves the whole weight to the sink

Masks = tuple[jax.Array, ...]


def window_blocks(x: jax.Array, window: int) -> jax.Array:
    """[b, t, ...] to [b, t / w, 2 w, ...]: each block of `window` rows behind its predecessor."""
    b, t = x.shape[:2]
    blocks = x.reshape(b, t // window, window, *x.shape[2:])
    before = jnp.concatenate([jnp.zeros_like(blocks[:, :1]), blocks[:, :-1]], axis=1)
    return jnp.concatenate([before, blocks], axis=2)


def _fold_blocks(g: jax.Array) -> jax.Array:
    """The transpose of `window_blocks`: [b, n, 2 w, d] to [b, n w, d], summing both uses."""
    b, n, double, d = g.shape
    before, own = g[:, :, : double // 2], g[:, :, double // 2 :]
    shifted = jnp.concatenate([before[:, 1:], jnp.zeros_like(before[:, :1])], axis=1)
    return (own + shifted).reshape(b, n * double // 2, d)


def window_mask(segments: jax.Array, window: int) -> jax.Array:
    """bool [b, t / w, w, 2 w]: the key is at most window - 1 behind, in the query's segment."""
    keys = window_blocks(segments, window)
    b, t = segments.shape
    queries = segments.reshape(b, t // window, window)
    back = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)[None, :]
    near = (back >= 0) & (back < window)
    same = queries[..., :, None] == keys[..., None, :]
    return near & same & (queries > 0)[..., None]


def entry_masks(segments: jax.Array, ratio: int, bounds: Sequence[int]) -> Masks:
    """Which entries a query may see, one bool [b, rows, n] per chunk of query rows.

    Args:
        segments: int32 [b, t], 0 for padding; all rows, a multiple of `ratio`.
        ratio: columns an entry covers; entry j ends at column ratio (j + 1) - 1.
        bounds: chunk borders, from the first query column to t; chunk i gets the entries that end
            before bounds[i + 1], which a causal query cannot exceed.
    """
    ends = segments[:, ratio - 1 :: ratio]
    masks = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        count = high // ratio
        queries = segments[:, low:high]
        closed = (jnp.arange(low, high) + 1)[:, None] // ratio > jnp.arange(count)[None, :]
        same = queries[:, :, None] == ends[:, None, :count]
        masks.append(closed[None] & same & (queries > 0)[:, :, None])
    return tuple(masks)


def _dot(spec: str, a: jax.Array, b: jax.Array, out: jnp.dtype) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=out)


def _probabilities(
    q: jax.Array,
    keys: jax.Array,
    entries: jax.Array | None,
    sink: jax.Array,
    seen: jax.Array,
    chosen: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]:
    """Window, entry and sink probabilities of one chunk, and each row's largest logit [b, c, h]."""
    b, c, h, d = q.shape
    blocks, double = keys.shape[1], keys.shape[2]
    q_blocks = q.reshape(b, blocks, c // blocks, h, d)
    near = _dot("bnqhd,bnkd->bnqhk", q_blocks, keys, jnp.float32)
    near = jnp.where(seen[:, :, :, None, :], near, _HIDDEN).reshape(b, c, h, double)
    top = jnp.max(near, axis=-1)
    far = None
    if entries is not None and chosen is not None:
        far = _dot("bqhd,bnd->bqhn", q, entries, jnp.float32)
        far = jnp.where(chosen[:, :, None, :], far, _HIDDEN)
        top = jnp.maximum(top, jnp.max(far, axis=-1))
    peak = jnp.maximum(top, sink)
    to_sink = jnp.exp(sink - peak)
    near = jnp.exp(near - peak[..., None])
    total = to_sink + jnp.sum(near, axis=-1)
    if far is not None:
        far = jnp.exp(far - peak[..., None])
        total = total + jnp.sum(far, axis=-1)
    inverse = 1.0 / total
    p_near = (near * inverse[..., None]).astype(q.dtype)
    p_far = None if far is None else (far * inverse[..., None]).astype(q.dtype)
    return p_near, p_far, to_sink * inverse, top


def _chunks(q: jax.Array, masks: Masks) -> list[tuple[int, int]]:
    lengths = [m.shape[1] for m in masks] or [q.shape[1]]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@jax.custom_vjp
def attend(
    q: jax.Array,
    kv: jax.Array,
    entries: jax.Array | None,
    sink: jax.Array,
    seen: jax.Array,
    masks: Masks,
) -> tuple[jax.Array, Masks, jax.Array]:
    """One softmax over window rows, compressed entries and the sink.

    Args:
        q: [b, r, h, d], already scaled by d^-0.5 and rotated.
        kv: [b, r, d], window rows of the same r columns.
        entries: [b, n, d], or None in a window-only layer.
        sink: float32 [h], a plain logit with value zero.
        seen: bool from `window_mask`.
        masks: bool from `entry_masks`, restricted to the selection; () without entries.

    Returns:
        The output [b, r, h, d]; per chunk the attention mass on each entry, the mean over heads
        (float32 [b, rows, n], no gradient); and the largest logit of each head, float32 [h].
        Formula: model specification, section "Attention".
    """
    return _forward(q, kv, entries, sink, seen, masks)[0]


def _forward(
    q: jax.Array,
    kv: jax.Array,
    entries: jax.Array | None,
    sink: jax.Array,
    seen: jax.Array,
    masks: Masks,
) -> tuple[tuple[jax.Array, Masks, jax.Array], tuple[Any, ...]]:
    window = seen.shape[2]
    keys = window_blocks(kv, window)
    outputs, mass, saved, tops = [], [], [], []
    for i, (low, high) in enumerate(_chunks(q, masks)):
        part, blocks = q[:, low:high], slice(low // window, high // window)
        chosen = masks[i] if masks else None
        far = entries[:, : masks[i].shape[2]] if entries is not None else None
        p_near, p_far, p_sink, top = _probabilities(
            part, keys[:, blocks], far, sink, seen[:, blocks], chosen
        )
        b, c, h, double = p_near.shape
        p_blocks = p_near.reshape(b, c // window, window, h, double)
        o = _dot("bnqhk,bnkd->bnqhd", p_blocks, keys[:, blocks], jnp.float32)
        o = o.reshape(part.shape)
        if p_far is not None and far is not None:
            o = o + _dot("bqhn,bnd->bqhd", p_far, far, jnp.float32)
            mass.append(jnp.mean(p_far.astype(jnp.float32), axis=2))
        outputs.append(o.astype(q.dtype))
        saved.append((p_near, p_far, p_sink))
        tops.append(jnp.max(top, axis=(0, 1)))
    o = jnp.concatenate(outputs, axis=1)
    largest = jnp.max(jnp.stack(tops), axis=0)
    return (o, tuple(mass), largest), (q, kv, entries, seen, masks, o, tuple(saved))


def _backward(
    residuals: tuple[Any, ...], cotangents: tuple[jax.Array, Masks, jax.Array]
) -> tuple[Any, ...]:
    q, kv, entries, seen, masks, o, saved = residuals
    window, dtype = seen.shape[2], q.dtype
    do = cotangents[0].astype(dtype)
    # sum_j dp_j p_j without a pass over the probabilities
    t = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    keys = window_blocks(kv, window)
    dq, dkeys, dsink = [], [], jnp.zeros((q.shape[2],), jnp.float32)
    dentries = jnp.zeros(() if entries is None else entries.shape, jnp.float32)
    for i, (low, high) in enumerate(_chunks(q, masks)):
        blocks = slice(low // window, high // window)
        part, g, k = q[:, low:high], do[:, low:high], keys[:, blocks]
        inner = t[:, low:high, :, None]
        p_near, p_far, p_sink = saved[i]
        b, c, h, double = p_near.shape
        shape = (b, c // window, window, h)
        g_blocks, q_blocks = g.reshape(*shape, -1), part.reshape(*shape, -1)
        dp = _dot("bnqhd,bnkd->bnqhk", g_blocks, k, dtype)
        p_blocks = p_near.reshape(*shape, double)
        ds = _softmax_gradient(p_blocks, dp, inner.reshape(*shape, 1))
        dpart = _dot("bnqhk,bnkd->bnqhd", ds, k, jnp.float32).reshape(part.shape)
        dkeys.append(
            _dot("bnqhk,bnqhd->bnkd", ds, q_blocks, jnp.float32)
            + _dot("bnqhk,bnqhd->bnkd", p_blocks, g_blocks, jnp.float32)
        )
        dsink = dsink - jnp.sum(p_sink * inner[..., 0], axis=(0, 1))
        if p_far is not None and entries is not None:
            n = masks[i].shape[2]
            far = entries[:, :n]
            ds = _softmax_gradient(p_far, _dot("bqhd,bnd->bqhn", g, far, dtype), inner)
            dpart = dpart + _dot("bqhn,bnd->bqhd", ds, far, jnp.float32)
            dfar = _dot("bqhn,bqhd->bnd", ds, part, jnp.float32)
            dfar = dfar + _dot("bqhn,bqhd->bnd", p_far, g, jnp.float32)
            dentries = dentries.at[:, :n].add(dfar)
        dq.append(dpart.astype(dtype))
    dkv = _fold_blocks(jnp.concatenate(dkeys, axis=1)).astype(kv.dtype)
    dentries = None if entries is None else dentries.astype(entries.dtype)
    return jnp.concatenate(dq, axis=1), dkv, dentries, dsink, None, tuple(None for _ in masks)


def _softmax_gradient(p: jax.Array, dp: jax.Array, inner: jax.Array) -> jax.Array:
    return (p.astype(jnp.float32) * (dp.astype(jnp.float32) - inner)).astype(p.dtype)


attend.defvjp(_forward, _backward)
