"""Exact top-k masks by bisection on the bits of a score: no sort, ties to the lower index."""

import jax
import jax.numpy as jnp
from jax import lax

_SIGN = 0x80000000


def sortable(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """uint32 keys in the order of float32 `scores`; 0 where not visible."""
    # -0 and +0 are one value, so they must tie.
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    sign = jnp.uint32(_SIGN)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)
    return jnp.where(visible, keys, jnp.uint32(0))


def top_k_mask(keys: jax.Array, k: int) -> jax.Array:
    """The k largest non-zero keys of the last axis, bool of the same shape.

    Args:
        keys: uint32 [..., n] from `sortable`.
        k: how many; all non-zero keys when there are fewer.
    """
    n = keys.shape[-1]

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)

    def value_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        raised = threshold | (jnp.uint32(_SIGN) >> i.astype(jnp.uint32))
        return jnp.where(count(keys >= raised) >= k, raised, threshold)

    threshold = jnp.zeros((*keys.shape[:-1], 1), jnp.uint32)
    threshold = lax.fori_loop(0, 32, value_bit, threshold)
    above = keys > threshold
    room = k - count(above)
    index = lax.broadcasted_iota(jnp.int32, (1,) * (keys.ndim - 1) + (n,), keys.ndim - 1)
    bits = n.bit_length()

    def index_bit(i: jax.Array, cut: jax.Array) -> jax.Array:
        raised = cut | (jnp.int32(1) << (bits - 1 - i))
        return jnp.where(count((keys == threshold) & (index < raised)) <= room, raised, cut)

    cut = lax.fori_loop(0, bits, index_bit, jnp.zeros(room.shape, jnp.int32))
    return (keys > 0) & (above | ((keys == threshold) & (index < cut)))


def candidate_mask(keys: jax.Array, newest: jax.Array, size: int, blocks: int) -> jax.Array:
    """Entries inside the kept candidate blocks, bool [..., n].

    Args:
        keys: uint32 [..., n] from `sortable`, n a multiple of `size`.
        newest: int32, broadcastable to [..., 1]: index of the newest entry of each query.
        size: entries a block.
        blocks: blocks kept, the newest one always among them.
    """
    best = jnp.max(keys.reshape(*keys.shape[:-1], -1, size), axis=-1)
    shape = (1,) * (keys.ndim - 1) + (best.shape[-1],)
    forced = lax.broadcasted_iota(jnp.int32, shape, keys.ndim - 1) == newest // size
    # Forcing by an infinite score would take the whole range of the bisection.
    kept = forced | top_k_mask(jnp.where(forced, jnp.uint32(0), best), blocks - 1)
    return jnp.repeat(kept, size, axis=-1)
