"""Engram: n-gram memory rows, looked up from token ids alone and gated into every stream."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import Rows
from deepinfer_jax.model.engram_hash import EngramHash, engram_hash
from deepinfer_jax.model.params import Engram
from deepinfer_jax.ops.table import Ops

_GATE_FLOOR = 1e-6


def _digits(values: np.ndarray, count: int) -> np.ndarray:
    return np.stack([(values >> (8 * i)) & 255 for i in range(count)]).astype(np.uint32)


def hash_on_device(ids: jax.Array, constants: EngramHash) -> jax.Array:
    """Table rows of n-grams, int32 [n, layers, columns], in 32-bit integers only.

    `ids` int32 [n, order] holds compressed ids, the row's own first, blocked ones already replaced
    by the pad. The 63-bit products are carried as bytes, and the remainders taken byte by byte.
    """
    layers, order = constants.multipliers.shape
    columns = constants.primes.shape[1]
    heads = columns // (order - 1)
    if constants.primes.max(initial=0) >= 2**24:
        raise ConfigError(
            f"An Engram table has {constants.primes.max()} rows; the device hash holds 2^24 - 1.",
            "Its remainders are taken in 32-bit integers, 8 bits at a time.",
            "Use engram_vocab_size of at most 16777000.",
        )
    factor = _digits(constants.multipliers, 8)  # [8, layers, order]
    acc = [jnp.zeros((ids.shape[0], layers), jnp.uint32) for _ in range(8)]
    out = []
    for step in range(order):
        t = ids[:, step, None].astype(jnp.uint32)
        carry = jnp.zeros_like(acc[0])
        for byte in range(8):
            total = t * factor[byte, :, step] + carry  # below 2^17 * 2^8 + 2^17
            acc[byte] = acc[byte] ^ (total & 255)
            carry = total >> 8
        if step:
            part = slice((step - 1) * heads, step * heads)
            prime = constants.primes[:, part].astype(np.uint32)
            rest = jnp.zeros((ids.shape[0], layers, heads), jnp.uint32)
            for byte in reversed(range(8)):
                rest = (rest * 256 + acc[byte][..., None]) % prime
            out.append(rest.astype(jnp.int32) + constants.offsets[:, part].astype(np.int32))
    return jnp.concatenate(out, -1)


def look_back(
    rows: Rows, token_map: jax.Array, history: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Compressed n-gram ids [n, order] of every row, and the history with this step's ids.

    Positions before the start, and all beyond an image token, read as the pad.
    """
    own = token_map[rows.ids]
    if config.image_token_id is not None:
        own = jnp.where(rows.ids == config.image_token_id, -1, own)
    size = history.shape[1]
    steps = jnp.arange(config.engram_max_ngram_size, dtype=jnp.int32)
    position, in_step, row = rows.back(steps)
    kept = history[rows.slot[:, None], position % size]
    # Read before it is written, the cache is written in place.
    kept, history = jax.lax.optimization_barrier((kept, history))
    ids = jnp.where(in_step, own[row], kept)
    ids = jnp.where(position < 0, -1, ids)
    blocked = jax.lax.cummax((ids < 0).astype(jnp.int32), axis=1) > 0
    pad = token_map[config.engram_pad_token_id]
    # Below a window floor too: a replay is led by rows that run for nothing but their ids.
    place = rows.writable(size, floored=False), rows.position % size
    history = history.at[place].set(own, mode="drop")
    return jnp.where(blocked, pad, ids), history


def engram_rows(
    rows: Rows, token_map: jax.Array, history: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Table rows int32 [n, layers, columns] of every row, and the new history."""
    ids, history = look_back(rows, token_map, history, config)
    return hash_on_device(ids, engram_hash(config)), history


@flax.struct.dataclass
class EngramOut:
    """The streams after the gate [n, s, d], and the gate [n, s] float32."""

    streams: jax.Array
    gate: jax.Array


def engram(
    streams: jax.Array,
    memory: jax.Array,
    params: Engram,
    is_image: jax.Array,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> EngramOut:
    """Add gated memory to every stream (model specification, "Gate").

    Args:
        streams: [n, s, d].
        memory: [n, columns * width], the looked-up rows side by side.
        is_image: bool [n]; the gate of these rows is 0.
    """
    n, s, d = streams.shape
    kv = ops.linear(memory, params.wkv, quantize=arithmetic.quantize_inputs)
    kv = kv.astype(jnp.float32).reshape(n, s + 1, d)
    key, value = kv[:, :s], kv[:, s]
    x = streams.astype(jnp.float32)
    weight = params.q_weight.astype(jnp.float32) * params.k_weight.astype(jnp.float32)
    eps = config.rms_norm_eps
    dot = jnp.sum(x * weight * key, -1) * d**-0.5
    dot = dot * jax.lax.rsqrt(jnp.mean(x * x, -1) + eps)
    dot = dot * jax.lax.rsqrt(jnp.mean(key * key, -1) + eps)
    root = jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), _GATE_FLOOR))
    gate = jnp.where(is_image[:, None], 0.0, jax.nn.sigmoid(root))
    return EngramOut((x + gate[..., None] * value[:, None]).astype(streams.dtype), gate)
