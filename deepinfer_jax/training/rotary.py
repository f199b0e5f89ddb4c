"""Rotation of adjacent channel pairs for batched rows; the angles come from the model's table."""

import jax
import jax.numpy as jnp
import numpy as np


def rotate(x: jax.Array, angles: np.ndarray, *, inverse: bool = False) -> jax.Array:
    """Rotate the last rotary channels of every row, in float32, cast to `x.dtype`.

    Args:
        x: [b, t, ..., c].
        angles: float32 [t, 2, rotary / 2], cos and sin of each row's position.
        inverse: rotate back.
    """
    return _rotate_vjp(x, jnp.asarray(angles), inverse)


def _rotate(x: jax.Array, angles: jax.Array, inverse: bool) -> jax.Array:
    half = angles.shape[-1]
    shape = (1, angles.shape[0], *(1,) * (x.ndim - 3), half)
    cos, sin = angles[:, 0].reshape(shape), angles[:, 1].reshape(shape)
    sin = -sin if inverse else sin
    tail = x[..., -2 * half :].astype(jnp.float32).reshape(*x.shape[:-1], half, 2)
    even, odd = tail[..., 0], tail[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    turned = turned.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return jnp.concatenate([x[..., : -2 * half], turned], axis=-1)


def _forward(x: jax.Array, angles: jax.Array, inverse: bool) -> tuple[jax.Array, jax.Array]:
    return _rotate(x, angles, inverse), angles


def _backward(inverse: bool, angles: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    # A rotation's transpose is its inverse.
    return _rotate(g, angles, not inverse), None


_rotate_vjp = jax.custom_vjp(_rotate, nondiff_argnums=(2,))
_rotate_vjp.defvjp(_forward, _backward)
