"""The small pieces every layer shares: RMS norm, the rotary tables and the rotation."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return (x32 * scale * weight.astype(jnp.float32)).astype(x.dtype)


def inverse_frequencies(config: ModelConfig, *, compressed: bool) -> np.ndarray:
    """Radians per position of each rotary pair, float32 [rope/2].

    Compressed layers use `compress_rope_theta` with YaRN, the others `rope_theta` without it;
    computed in float64 and rounded once (model specification, "Rotary embedding").
    """
    width = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    pair = np.arange(width // 2, dtype=np.float64)
    freq = float(theta) ** (-2 * pair / width)
    yarn = config.rope_scaling
    if not compressed or yarn is None:
        return freq.astype(np.float32)
    original = yarn.original_max_position_embeddings

    def dim(rotations: float) -> float:
        return width * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(dim(yarn.beta_fast)), 0)
    high = min(math.ceil(dim(yarn.beta_slow)), width - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
    return (freq * (1 - ramp) + freq / yarn.factor * ramp).astype(np.float32)


def rope_table(config: ModelConfig, positions: int, *, compressed: bool) -> np.ndarray:
    """(cos, sin) of every position, float32 [positions, 2, rope/2].

    The angle is rounded to float32 before cos and sin, which are taken in float64: near position
    2^20 that rounding is visible, so it is part of the numerics.
    """
    freq = inverse_frequencies(config, compressed=compressed)
    angles = np.arange(positions, dtype=np.float32)[:, None] * freq
    wide = angles.astype(np.float64)
    return np.stack([np.cos(wide), np.sin(wide)], 1).astype(np.float32)


def rotate(x: jax.Array, angles: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotate the adjacent pairs of the last rope channels of x [n, ..., k].

    Args:
        x: [n, ..., k].
        angles: float32 [n, 2, rope/2], rows of a rope table.
        inverse: rotate back.
    """
    half = angles.shape[-1]
    shape = (x.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = angles[:, 0].reshape(shape), angles[:, 1].reshape(shape)
    sin = -sin if inverse else sin
    tail = x[..., -2 * half :].astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    a, b = tail[..., 0], tail[..., 1]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1)
    turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return jnp.concatenate([x[..., : -2 * half], turned], -1)
