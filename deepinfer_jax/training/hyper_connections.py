"""mHC residual streams: the mixes of a sublayer, the delayed collapse, and the write-back."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.ops.mhc import sinkhorn
from deepinfer_jax.training.linear import project
from deepinfer_jax.training.sinkhorn import sinkhorn_kernel


def mixes(
    streams: jax.Array,
    weights: Mapping[str, jax.Array],
    prefix: str,
    config: ModelConfig,
    *,
    kernel: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """pre [b, t, n], post [b, t, n] and comb [b, t, n, n] of one sublayer, float32.

    Args:
        streams: [b, t, n, d], the residual streams that enter the sublayer.
        weights: the parameters, `{prefix}_fn`, `_base` and `_scale` among them.
        prefix: `layers.{l}.hc_attn` or `layers.{l}.hc_ffn`.
        config: the network's numbers.
        kernel: normalise in the GPU kernel, not in XLA's loop.

    Formula: model specification, section "mixes"; comb[i, j] goes from stream i to stream j.
    """
    b, t, n, d = streams.shape
    flat = streams.reshape(b, t, n * d)
    square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
    m = project(flat, weights[f"{prefix}_fn"], jnp.float32, True)
    m = m * jax.lax.rsqrt(square + jnp.float32(1e-20))
    scale, base = weights[f"{prefix}_scale"], weights[f"{prefix}_base"]
    # Not `ops.mhc.split`: it normalises in a loop, which a GPU runs as many small kernels.
    pre = jax.nn.sigmoid(m[..., :n] * scale[0] + base[:n]) + config.hc_eps
    post = 2.0 * jax.nn.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    c = (m[..., 2 * n :] * scale[2] + base[2 * n :]).reshape(b * t, n, n)
    iterations, eps = config.hc_sinkhorn_iters, config.hc_eps
    comb = sinkhorn_kernel(c, iterations, eps) if kernel else sinkhorn(c, iters=iterations, eps=eps)
    return pre, post, comb.reshape(b, t, n, n)


# Sums over the few streams are written out: a reduction over a dimension of four, not the last
# one, would be a kernel of its own instead of a part of its neighbours.


def _mix(matrix: jax.Array, streams: jax.Array) -> jax.Array:
    """sum_i matrix[..., i, j] streams[..., i, :] as [b, t, j, d], float32."""
    terms = [
        matrix[:, :, i, :, None] * streams[:, :, i, None, :].astype(jnp.float32)
        for i in range(streams.shape[2])
    ]
    return sum(terms[1:], terms[0])


def collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    """sum_i pre_i X_i in float32, [b, t, d] in the streams' dtype."""
    return _collapse_vjp(streams, pre)


def _collapse(streams: jax.Array, pre: jax.Array) -> jax.Array:
    return _mix(pre[..., None], streams)[:, :, 0].astype(streams.dtype)


def _collapse_forward(
    streams: jax.Array, pre: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _collapse(streams, pre), (streams, pre)


def _collapse_backward(
    saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    streams, pre = saved
    g32 = g.astype(jnp.float32)[:, :, None, :]
    dstreams = (pre[..., None] * g32).astype(streams.dtype)
    return dstreams, jnp.sum(streams.astype(jnp.float32) * g32, axis=-1)


_collapse_vjp = jax.custom_vjp(_collapse)
_collapse_vjp.defvjp(_collapse_forward, _collapse_backward)


def write_back(streams: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """X'_j = post_j y + sum_i comb[i, j] X_i, [b, t, n, d] in the streams' dtype."""
    return _write_vjp(streams, y, post, comb)


def _write(streams: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    written = post[..., None] * y.astype(jnp.float32)[:, :, None, :]
    return (_mix(comb, streams) + written).astype(streams.dtype)


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _write_forward(
    streams: jax.Array, y: jax.Array, post: jax.Array, comb: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _write(streams, y, post, comb), (streams, y, post, comb)


def _write_backward(saved: _Saved, g: jax.Array) -> _Saved:
    # Written out so that it reads the streams once more instead of float32 copies of them.
    streams, y, post, comb = saved
    g32, wide, y32 = (a.astype(jnp.float32) for a in (g, streams, y))
    dstreams = _mix(jnp.swapaxes(comb, 2, 3), g).astype(streams.dtype)
    dcomb = jnp.sum(wide[:, :, :, None, :] * g32[:, :, None, :, :], axis=-1)
    dy = _mix(post[..., None], g)[:, :, 0].astype(y.dtype)
    return dstreams, dy, jnp.sum(g32 * y32[:, :, None, :], axis=-1), dcomb


_write_vjp = jax.custom_vjp(_write)
_write_vjp.defvjp(_write_forward, _write_backward)
