"""Quantization-aware training: weights rounded to the release formats, gradients passed through."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from deepinfer_jax.checkpoint.inventory import TensorSpec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.ops.quant import (
    E4M3,
    E4M3_MAX,
    exponent_of_scale,
    power_of_two,
    qdq_fp4,
    qdq_fp8,
)
from deepinfer_jax.training.parameters import specs

_BLOCK = 32


Rounding = Callable[[jax.Array], jax.Array]


def straight_through(rounding: Rounding, x: jax.Array) -> jax.Array:
    """rounding(x) exactly, with the gradient of x."""
    return _through_vjp(rounding, x)


def _through(rounding: Rounding, x: jax.Array) -> jax.Array:
    return rounding(x)


def _through_forward(rounding: Rounding, x: jax.Array) -> tuple[jax.Array, None]:
    return rounding(x), None


def _through_backward(rounding: Rounding, saved: None, g: jax.Array) -> tuple[jax.Array]:
    del rounding, saved
    return (g,)


_through_vjp = jax.custom_vjp(_through, nondiff_argnums=(0,))
_through_vjp.defvjp(_through_forward, _through_backward)


def round_bf16(x: jax.Array) -> jax.Array:
    """float32 rounded to BF16 values; not a pair of casts, which a compiler may cancel."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_q8(weight: jax.Array) -> jax.Array:
    """float32 [o, i] rounded to E4M3 codes with one power-of-two scale per 32x32 block."""
    o, i = weight.shape
    blocks = weight.reshape(o // _BLOCK, _BLOCK, i // _BLOCK, _BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    scale = power_of_two(exponent_of_scale(amax, 1e-4, 1 / E4M3_MAX))
    codes = jnp.clip(blocks / scale, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    return (codes.astype(jnp.float32) * scale).reshape(o, i)


def round_weights(weights: Mapping[str, jax.Array], config: ModelConfig) -> dict[str, jax.Array]:
    """Every weight as the release stores it, float32, straight-through gradients.

    Dense linears FP8 per 32x32 block, routed experts FP4 per 32 inputs, Engram rows FP8 per 32
    channels, plain BF16 tensors rounded to BF16 (model specification, "Number formats").
    """
    return round_tensors(weights, specs(config))


def round_tensors(
    weights: Mapping[str, jax.Array], table: Mapping[str, TensorSpec]
) -> dict[str, jax.Array]:
    """The same for the weights that `table` names."""
    rounded = {}
    for name, spec in table.items():
        rounding = {"q8": round_q8, "q4": qdq_fp4, "engram_table": qdq_fp8}.get(spec.kind)
        if spec.kind == "plain" and spec.dtypes[0] == "BF16":
            rounding = round_bf16
        value = weights[name]
        rounded[name] = value if rounding is None else straight_through(rounding, value)
    return rounded
