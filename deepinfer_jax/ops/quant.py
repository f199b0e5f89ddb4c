"""The release's activation and cache formats: group scales, codes, and quantize-dequantize.

Three quantizers over groups of consecutive channels of the last axis (model specification,
section "Number formats"); all arithmetic is float32, rounding is to nearest, ties to even codes:

    QA  FP8 E4M3 codes, groups of 32, power-of-two scale   window KV and inputs of linears
    QI  FP4 E2M1 codes, groups of 32, power-of-two scale   index keys and index queries
    QK  FP4 E2M1 codes, groups of 16, FP8 E4M3 scale       main compressed KV
"""

import jax
import jax.numpy as jnp

E4M3 = jnp.float8_e4m3fn
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def exponent_of_scale(amax: jax.Array, floor: float, inverse_max: float) -> jax.Array:
    """Biased exponent e, int32, of the least power of two 2^(e-127) >= max(amax, floor)/max.

    The ceiling is taken on the float32 bits: the exponent, plus one if any mantissa bit is set.
    """
    ratio = jnp.maximum(amax, jnp.float32(floor)) * jnp.float32(inverse_max)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^(exponent-127) in float32 for biased exponents 1..254."""
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


# Midpoints between neighbouring E2M1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; `True` where the tie
# goes up, to the even code.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0)


def _round_e2m1(x: jax.Array, scale: jax.Array) -> jax.Array:
    """E2M1 value nearest to x / scale, times scale: float32, clipped at +-6 scales.

    Compares |x| with midpoint x scale, which is exact, where a division might be turned into a
    product with a rounded reciprocal and move a tie.
    """
    a = jnp.abs(x)
    value = jnp.zeros_like(a)
    for (middle, up), step in zip((*_MIDPOINTS, (5.0, False)), (*_STEPS, 2.0), strict=True):
        bound = middle * scale
        value = value + jnp.where((a >= bound) if up else (a > bound), step, 0.0)
    return jnp.sign(x) * value * scale


def _groups(x: jax.Array, size: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """QA: x [..., c] -> (codes E4M3 [..., c], biased scale exponents uint8 [..., c/32])."""
    groups = _groups(x, 32)
    exponent = exponent_of_scale(jnp.max(jnp.abs(groups), -1), 1e-4, 1 / E4M3_MAX)
    scaled = groups / power_of_two(exponent)[..., None]
    codes = jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    return codes.reshape(x.shape), exponent.astype(jnp.uint8)


def qdq_fp8(x: jax.Array) -> jax.Array:
    """QA and back: x [..., c] rounded to its FP8 record, in x's dtype (exact in bfloat16)."""
    codes, exponent = quantize_fp8(x)
    values = _groups(codes, 32) * power_of_two(exponent)[..., None]
    return values.reshape(x.shape).astype(x.dtype)


def qdq_fp4(x: jax.Array) -> jax.Array:
    """QI and back: x [..., c] rounded to FP4 with power-of-two scales of 32, in x's dtype."""
    groups = _groups(x, 32)
    floor = E2M1_MAX * 2.0**-126
    exponent = exponent_of_scale(jnp.max(jnp.abs(groups), -1), floor, 1 / E2M1_MAX)
    scale = power_of_two(exponent)[..., None]
    values = _round_e2m1(groups, scale)
    return values.reshape(x.shape).astype(x.dtype)


def qdq_fp4_e4m3(x: jax.Array) -> jax.Array:
    """QK and back: x [..., c] rounded to FP4 with E4M3 scales of 16, in x's dtype."""
    groups = _groups(x, 16)
    amax = jnp.maximum(jnp.max(jnp.abs(groups), -1), jnp.float32(E2M1_MAX * 2.0**-9))
    scale = (amax / E2M1_MAX).astype(E4M3).astype(jnp.float32)[..., None]
    values = _round_e2m1(groups, scale)
    return values.reshape(x.shape).astype(x.dtype)
