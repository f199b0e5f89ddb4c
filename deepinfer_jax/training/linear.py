"""Matrix products of the training forward: compute in one dtype, keep float32 weight gradients."""

import jax
import jax.numpy as jnp

from deepinfer_jax.model import layers


def project(x: jax.Array, weight: jax.Array, out: jnp.dtype, exact: bool = False) -> jax.Array:
    """y = x weight^T with the operands in `x.dtype` and float32 accumulation.

    Args:
        x: [..., i], the compute dtype.
        weight: float32 [o, i], the master copy.
        out: dtype of y.
        exact: also multiply by the rounding remainder of `weight`, so that a bfloat16 product
            sees the float32 weight to about 16 bits. For narrow outputs only.

    Returns:
        `out` [..., o]. Gradients are contracted in `x.dtype`; the weight's is float32.
    """
    return _project_vjp(x, weight, out, exact)


def _project(x: jax.Array, weight: jax.Array, out: jnp.dtype, exact: bool) -> jax.Array:
    high = weight.astype(x.dtype)
    if not exact or x.dtype == weight.dtype:
        return jnp.einsum("...i,oi->...o", x, high, preferred_element_type=out)
    rest = (weight - high.astype(weight.dtype)).astype(x.dtype)
    both = jnp.einsum(
        "...i,oi->...o", x, jnp.concatenate([high, rest]), preferred_element_type=jnp.float32
    )
    first, second = jnp.split(both, 2, axis=-1)
    return (first + second).astype(out)


def _forward(
    x: jax.Array, weight: jax.Array, out: jnp.dtype, exact: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _project(x, weight, out, exact), (x, weight)


def _backward(
    out: jnp.dtype, exact: bool, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    # A float32 cotangent would drag both products into float32 matrix units.
    g = g.astype(x.dtype)
    dx = jnp.einsum("...o,oi->...i", g, weight.astype(x.dtype), preferred_element_type=x.dtype)
    rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    return dx, jnp.einsum("to,ti->oi", grads, rows, preferred_element_type=jnp.float32)


_project_vjp = jax.custom_vjp(_project, nondiff_argnums=(2, 3))
_project_vjp.defvjp(_forward, _backward)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The model's norm over the last axis, with a gradient that keeps x in its own dtype."""
    return _norm_vjp(x, weight, eps)


def _norm_forward(
    x: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return layers.rms_norm(x, weight, eps), (x, weight)


def _norm_backward(
    eps: float, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    unit = x32 * scale
    weighted = g32 * weight
    dx = scale * (weighted - unit * jnp.mean(weighted * unit, axis=-1, keepdims=True))
    return dx.astype(x.dtype), jnp.sum(g32 * unit, axis=tuple(range(x.ndim - 1)))


_norm_vjp = jax.custom_vjp(layers.rms_norm, nondiff_argnums=(2,))
_norm_vjp.defvjp(_norm_forward, _norm_backward)
