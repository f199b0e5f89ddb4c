"""The model's rotation for batched rows, with a gradient that keeps nothing but the angles."""

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.model import layers


def rotate(x: jax.Array, angles: np.ndarray | jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotate the last rotary channels of every row, in float32, cast to `x.dtype`.

    Args:
        x: [b, t, ..., c].
        angles: float32 [t, 2, rotary / 2], cos and sin of each row's position.
        inverse: rotate back.
    """
    return _rotate_vjp(x, jnp.asarray(angles), inverse)


def _rotate(x: jax.Array, angles: jax.Array, inverse: bool) -> jax.Array:
    return jax.vmap(lambda row: layers.rotate(row, angles, inverse=inverse))(x)


def _forward(x: jax.Array, angles: jax.Array, inverse: bool) -> tuple[jax.Array, jax.Array]:
    return _rotate(x, angles, inverse), angles


def _backward(inverse: bool, angles: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    # A rotation's transpose is its inverse.
    return _rotate(g, angles, not inverse), None


_rotate_vjp = jax.custom_vjp(_rotate, nondiff_argnums=(2,))
_rotate_vjp.defvjp(_forward, _backward)
