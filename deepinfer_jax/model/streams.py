"""The residual streams of the hyper-connections: how a sublayer reads and writes them."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Residual:
    """What flows from layer to layer.

    Attributes:
        streams: [n, s, d].
        pre: float32 [n, s], the mix that collapses the streams for the next sublayer; each
            sublayer's own is used by the one after it.
    """

    streams: jax.Array
    pre: jax.Array


def start_streams(embedded: jax.Array, count: int) -> Residual:
    """The residual that enters the first layer: `count` copies of embeddings [n, d]."""
    streams = jnp.repeat(embedded[:, None], count, 1)
    return Residual(streams, jnp.zeros(streams.shape[:2], jnp.float32).at[:, 0].set(1.0))


def collapse(residual: Residual) -> jax.Array:
    """The weighted sum of the streams [n, d]: float32 inside, the streams' dtype out."""
    x = jnp.sum(residual.streams.astype(jnp.float32) * residual.pre[..., None], 1)
    return x.astype(residual.streams.dtype)


def expand_streams(y: jax.Array, post: jax.Array, comb: jax.Array, streams: jax.Array) -> jax.Array:
    """X'_j = post_j y + sum_i comb_ij X_i; float32 inside, the streams' dtype out."""
    mixed = jnp.einsum("nij,nid->njd", comb, streams.astype(jnp.float32), precision="highest")
    return (post[..., None] * y.astype(jnp.float32)[:, None] + mixed).astype(streams.dtype)


def stream_mean(streams: jax.Array) -> jax.Array:
    """The mean of the streams [n, d], in their dtype; a drafter reads it."""
    return jnp.mean(streams.astype(jnp.float32), 1).astype(streams.dtype)
