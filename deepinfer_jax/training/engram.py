"""Engram in training: table rows hashed on the device, and the gated write into the streams."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.engram import hash_on_device
from deepinfer_jax.model.engram_hash import engram_hash
from deepinfer_jax.training.linear import project

_SLOPE_FLOOR = 1e-2  # below this |dot| the root's slope is that of 1e-2: 5 instead of 500


def table_rows(
    token_map: np.ndarray, ids: jax.Array, segments: jax.Array, config: ModelConfig
) -> jax.Array:
    """Table rows int32 [b, t, layers, columns]; look-back stops at a segment border.

    Args:
        token_map: int [vocab], the tokenizer's compressed ids.
        ids: int32 [b, t].
        segments: int32 [b, t].
        config: the network's numbers.

    Equal to the host's hash of each segment on its own (model specification, "Hash"). Raises
    ConfigError for tables too large for the device hash.
    """
    compressed = jnp.asarray(token_map.astype(np.int32))
    own, pad = compressed[ids], compressed[config.engram_pad_token_id]
    blocked = jnp.zeros(ids.shape, bool)
    gram = []
    for step in range(config.engram_max_ngram_size):
        back = jnp.pad(own, ((0, 0), (step, 0)))[:, : ids.shape[1]]
        there = jnp.pad(segments, ((0, 0), (step, 0)), constant_values=-1)[:, : ids.shape[1]]
        blocked = blocked | (there != segments)
        gram.append(jnp.where(blocked, pad, back))
    rows = hash_on_device(jnp.stack(gram, axis=-1).reshape(ids.size, -1), engram_hash(config))
    return rows.reshape(*ids.shape, *rows.shape[1:])


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
