"""Engram in training: table rows hashed on the device, and the gated write into the streams."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.engram_hash import engram_hash
from deepinfer_jax.training.linear import project

_SLOPE_FLOOR = 1e-2  # below this |dot| the root's slope is that of 1e-2: 5 instead of 500


@dataclass(frozen=True)
class HashTables:
    """The hash without 64-bit integers: every product of a token and a multiplier, in two halves.

    Attributes:
        high, low: uint32 [layers, order, vocab], halves of map[id] * multiplier.
        pad: int, the token id whose products stand for a blocked position.
        primes, offsets: uint32 [layers, columns].
    """

    high: np.ndarray
    low: np.ndarray
    pad: int
    primes: np.ndarray
    offsets: np.ndarray


def hash_tables(config: ModelConfig, token_map: np.ndarray) -> HashTables:
    """Tables of `config`; `token_map` int [vocab] gives the tokenizer's compressed ids.

    Raises ConfigError when a bucket is too large for 32-bit arithmetic.
    """
    constants = engram_hash(config)
    largest = int(constants.primes.max())
    if largest >= 1 << 16:
        raise ConfigError(
            f"An Engram bucket has {largest} rows; training hashes with 32-bit integers.",
            "A bucket of 65536 rows or more overflows them.",
            "Train a config with engram_vocab_size below 65000.",
        )
    products = constants.multipliers[:, :, None] * token_map.astype(np.int64)
    return HashTables(
        high=(products >> 32).astype(np.uint32),
        low=(products & 0xFFFFFFFF).astype(np.uint32),
        pad=config.engram_pad_token_id,
        primes=constants.primes.astype(np.uint32),
        offsets=constants.offsets.astype(np.uint32),
    )


def hash_on_device(tables: HashTables, ids: jax.Array, segments: jax.Array) -> jax.Array:
    """Table rows int32 [b, t, layers, columns]; look-back stops at a segment border.

    Args:
        tables: from `hash_tables`.
        ids: int32 [b, t].
        segments: int32 [b, t].

    Equal to the host's 64-bit hash of each segment on its own (model specification, "Hash").
    """
    layers, order, _ = tables.high.shape
    heads = tables.primes.shape[1] // (order - 1)
    high = low = jnp.zeros((*ids.shape, layers), jnp.uint32)
    blocked = jnp.zeros(ids.shape, bool)
    columns = []
    for step in range(order):
        back = jnp.pad(ids, ((0, 0), (step, 0)))[:, : ids.shape[1]]
        there = jnp.pad(segments, ((0, 0), (step, 0)), constant_values=-1)[:, : ids.shape[1]]
        blocked = blocked | (there != segments)
        token = jnp.where(blocked, tables.pad, back)
        high = high ^ jnp.asarray(tables.high[:, step].T)[token]
        low = low ^ jnp.asarray(tables.low[:, step].T)[token]
        if step == 0:
            continue
        own = slice((step - 1) * heads, step * heads)
        primes = jnp.asarray(tables.primes[:, own])
        carry = jnp.asarray(((1 << 32) % tables.primes[:, own].astype(np.int64)).astype(np.uint32))
        mixed = (high[..., None] % primes) * carry + low[..., None] % primes
        columns.append(mixed % primes + jnp.asarray(tables.offsets[:, own]))
    return jnp.concatenate(columns, axis=-1).astype(jnp.int32)


@jax.custom_jvp
def signed_root(dot: jax.Array) -> jax.Array:
    """sign(d) sqrt(max(|d|, 1e-6)), with a bounded slope near zero."""
    return jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))


@signed_root.defjvp
def _signed_root_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (dot,), (tangent,) = primals, tangents
    slope = 0.5 * jax.lax.rsqrt(jnp.maximum(jnp.abs(dot), _SLOPE_FLOOR))
    return signed_root(dot), slope * tangent


@jax.checkpoint
def _gated(
    streams: jax.Array, key: jax.Array, value: jax.Array, weight: jax.Array, eps: jax.Array
) -> jax.Array:
    wide, key32 = streams.astype(jnp.float32), key.astype(jnp.float32)
    d = streams.shape[-1]
    dot = jnp.sum(wide * weight * key32, axis=-1) * np.float32(d**-0.5)
    dot = dot * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    dot = dot * jax.lax.rsqrt(jnp.mean(key32 * key32, axis=-1) + eps)
    gate = jax.nn.sigmoid(signed_root(dot))
    return (wide + gate[..., None] * value.astype(jnp.float32)[:, :, None, :]).astype(streams.dtype)


def engram(
    streams: jax.Array,
    hashes: jax.Array,
    weights: Mapping[str, jax.Array],
    prefix: str,
    config: ModelConfig,
) -> jax.Array:
    """X_i + gate_i value for all streams, [b, t, n, d] (model specification, section "Gate").

    Args:
        streams: [b, t, n, d].
        hashes: int32 [b, t, columns], rows of this layer's table.
        weights: the parameters.
        prefix: `layers.{l}.engram`.
        config: the network's numbers.
    """
    b, t, n, d = streams.shape
    # Gathered before the cast, so that the scatter of its gradient adds in float32.
    rows = weights[f"{prefix}.embed.weight"][hashes].reshape(b, t, -1).astype(streams.dtype)
    kv = project(rows, weights[f"{prefix}.wkv.weight"], streams.dtype, False)
    weight = weights[f"{prefix}.q_weight"] * weights[f"{prefix}.k_weight"]
    key, value = kv[..., : n * d].reshape(b, t, n, d), kv[..., n * d :]
    return _gated(streams, key, value, weight, jnp.float32(config.rms_norm_eps))
