"""`mhc(streams, fn, base, scale, ...) -> (pre, post, comb)`: the mixes of one hyper-connection.

streams [n, s, d], fn [s(s+2), s d], base [s(s+2)], scale [3]; pre, post [n, s] and comb [n, s, s]
float32. comb's row is the source stream, its column the target (model specification, "mixes").
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.rowwise import TILE, in_tiles

_RMS_EPS = 1e-20


def sinkhorn(logits: jax.Array, *, iters: int, eps: float) -> jax.Array:
    """Row softmax, then `iters` column and `iters` - 1 row normalisations of [..., s, s]."""
    comb = jax.nn.softmax(logits, axis=-1) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)

    def normalise(_: int, comb: jax.Array) -> jax.Array:
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        return comb / (comb.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(1, iters, normalise, comb)


def split(
    mixes: jax.Array, base: jax.Array, scale: jax.Array, *, streams: int, iters: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Raw mixes [n, s(s+2)] -> (pre, post, comb)."""
    s = streams
    pre = jax.nn.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * jax.nn.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).reshape(-1, s, s)
    return pre, post, sinkhorn(comb, iters=iters, eps=eps)


def xla(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, iters: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plain float32 arithmetic; the RMS runs over all streams jointly, without a weight."""
    n, s, _ = streams.shape
    flat = streams.reshape(n, -1).astype(jnp.float32)
    mean_square = jnp.mean(flat * flat, -1, keepdims=True)
    mixes = jnp.einsum("ni,oi->no", flat, fn, precision="highest")
    mixes = mixes * jax.lax.rsqrt(mean_square + _RMS_EPS)
    return split(mixes, base, scale, streams=s, iters=iters, eps=eps)


def row_tiles(
    streams: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, iters: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`xla` on tiles of rows, so that one compiled order of every sum serves any number."""

    def mixes(part: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return xla(part, fn, base, scale, iters=iters, eps=eps)

    return mixes(streams) if streams.shape[0] == TILE else in_tiles(mixes, streams, size=TILE)


KERNELS = (
    Kernel("mhc", "xla", xla),
    Kernel("mhc", "row_tiles", row_tiles, on=frozenset({"cpu"}), batch_invariant=True),
)
