"""The release's activation and cache formats: group scales, codes, records, and there and back.

Three quantizers over groups of consecutive channels of the last axis (model specification,
section "Number formats"); all arithmetic is float32, rounding is to nearest, ties to even codes:

    QA  FP8 E4M3 codes, groups of 32, power-of-two scale   window KV and inputs of linears
    QI  FP4 E2M1 codes, groups of 32, power-of-two scale   index keys and index queries
    QK  FP4 E2M1 codes, groups of 16, FP8 E4M3 scale       main compressed KV

A record is the bytes of one vector: its codes, two E2M1 codes a byte with the even channel in the
low nibble, and then its scales. `decode_*` of `encode_*` gives the bits of `qdq_*`. A group that
holds a NaN or an infinity has a NaN scale, in the record as in the rounded values.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

Decode = Callable[[jax.Array, jnp.dtype], jax.Array]
"""(stored [..., size], dtype) -> values [..., c] of that dtype."""

E4M3 = jnp.float8_e4m3fn
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def numbers(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The `Decode` of what is stored as plain numbers."""
    return stored.astype(dtype)


def exponent_of_scale(amax: jax.Array, floor: float, inverse_max: float) -> jax.Array:
    """Biased exponent e, int32, of the least power of two 2^(e-127) >= max(amax, floor)/max.

    The ceiling is taken on the float32 bits: the exponent, plus one if any mantissa bit is set.
    What is not finite has the exponent 255.
    """
    ratio = jnp.maximum(amax, jnp.float32(floor)) * jnp.float32(inverse_max)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.int32)
    return jnp.minimum((bits >> 23) + ((bits & 0x7FFFFF) != 0).astype(jnp.int32), 255)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^(exponent-127) in float32 for biased exponents 1..254; infinity for 255."""
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


# Midpoints between neighbouring E2M1 magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; `True` where the tie
# goes up, to the even code.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True))
_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0)


def _passed(x: jax.Array, scale: jax.Array) -> Iterator[tuple[jax.Array, float]]:
    """Whether |x| / scale rounds beyond each E2M1 magnitude, and how far it is to the next.

    Compares |x| with midpoint x scale, which is exact, where a division might be turned into a
    product with a rounded reciprocal and move a tie.
    """
    a = jnp.abs(x)
    for (middle, up), step in zip((*_MIDPOINTS, (5.0, False)), (*_STEPS, 2.0), strict=True):
        bound = middle * scale
        yield (a >= bound) if up else (a > bound), step


def _round_e2m1(x: jax.Array, scale: jax.Array) -> jax.Array:
    """E2M1 value nearest to x / scale, times scale: float32, clipped at +-6 scales."""
    value = jnp.zeros_like(x)
    for passed, step in _passed(x, scale):
        value = value + jnp.where(passed, step, 0.0)
    return jnp.sign(x) * value * scale


def _e2m1_codes(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The same values as codes, uint8: bit 3 is the sign, kept by a zero too."""
    magnitude = jnp.zeros(x.shape, jnp.int32)
    for passed, _ in _passed(x, scale):
        magnitude = magnitude + passed.astype(jnp.int32)
    # Where subnormal numbers count as zero, a zero reaches the midpoints of the least scale.
    magnitude = jnp.where(x == 0, 0, magnitude)
    return (magnitude | jnp.where(jnp.signbit(x), 8, 0)).astype(jnp.uint8)


def e2m1_values(packed: jax.Array) -> jax.Array:
    """Bytes [..., c/2] of two E2M1 codes -> their values, float32 [..., c]."""
    code = jnp.stack([packed & 15, packed >> 4], -1).astype(jnp.int32)
    code = code.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    magnitude = code & 7
    # From 1.0 on (code 2), two bits are an exponent and the last one the upper half of its octave.
    octaves = jax.lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, 0.5 * magnitude.astype(jnp.float32), octaves)
    return jnp.where(code >= 8, -value, value)


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


def _exponent_fp4(groups: jax.Array) -> jax.Array:
    floor = E2M1_MAX * 2.0**-126
    return exponent_of_scale(jnp.max(jnp.abs(groups), -1), floor, 1 / E2M1_MAX)


def _scale_e4m3(groups: jax.Array) -> jax.Array:
    amax = jnp.maximum(jnp.max(jnp.abs(groups), -1), jnp.float32(E2M1_MAX * 2.0**-9))
    return (amax / E2M1_MAX).astype(E4M3)


def qdq_fp4(x: jax.Array) -> jax.Array:
    """QI and back: x [..., c] rounded to FP4 with power-of-two scales of 32, in x's dtype."""
    groups = _groups(x, 32)
    values = _round_e2m1(groups, power_of_two(_exponent_fp4(groups))[..., None])
    return values.reshape(x.shape).astype(x.dtype)


def qdq_fp4_e4m3(x: jax.Array) -> jax.Array:
    """QK and back: x [..., c] rounded to FP4 with E4M3 scales of 16, in x's dtype."""
    groups = _groups(x, 16)
    values = _round_e2m1(groups, _scale_e4m3(groups).astype(jnp.float32)[..., None])
    return values.reshape(x.shape).astype(x.dtype)


def _scaled(values: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Each group of values [..., c] times its scale [..., c/group]."""
    groups = values.reshape(*scale.shape, values.shape[-1] // scale.shape[-1])
    return (groups * scale[..., None]).reshape(values.shape).astype(dtype)


def _pack(codes: jax.Array) -> jax.Array:
    """E2M1 codes [..., groups, size] -> bytes [..., groups size / 2]."""
    pairs = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def encode_fp8(x: jax.Array) -> jax.Array:
    """QA: x [..., c] -> records uint8 [..., c + c/32], E4M3 codes and E8M0 scales."""
    codes, exponent = quantize_fp8(x)
    return jnp.concatenate([jax.lax.bitcast_convert_type(codes, jnp.uint8), exponent], -1)


def decode_fp8(record: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values [..., c] of QA records [..., c + c/32], in `dtype`."""
    c = record.shape[-1] * 32 // 33
    codes = jax.lax.bitcast_convert_type(record[..., :c], E4M3).astype(jnp.float32)
    return _scaled(codes, power_of_two(record[..., c:]), dtype)


def encode_fp4(x: jax.Array) -> jax.Array:
    """QI: x [..., c] -> records uint8 [..., c/2 + c/32], E2M1 codes and E8M0 scales."""
    groups = _groups(x, 32)
    exponent = _exponent_fp4(groups)
    codes = _pack(_e2m1_codes(groups, power_of_two(exponent)[..., None]))
    return jnp.concatenate([codes, exponent.astype(jnp.uint8)], -1)


def decode_fp4(record: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values [..., c] of QI records [..., c/2 + c/32], in `dtype`."""
    half = record.shape[-1] * 16 // 17
    return _scaled(e2m1_values(record[..., :half]), power_of_two(record[..., half:]), dtype)


def encode_fp4_e4m3(x: jax.Array) -> jax.Array:
    """QK: x [..., c] -> records uint8 [..., c/2 + c/16], E2M1 codes and E4M3 scales."""
    groups = _groups(x, 16)
    scale = _scale_e4m3(groups)
    codes = _pack(_e2m1_codes(groups, scale.astype(jnp.float32)[..., None]))
    return jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale, jnp.uint8)], -1)


def decode_fp4_e4m3(record: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The values [..., c] of QK records [..., c/2 + c/16], in `dtype`."""
    half = record.shape[-1] * 8 // 9
    scale = jax.lax.bitcast_convert_type(record[..., half:], E4M3).astype(jnp.float32)
    return _scaled(e2m1_values(record[..., :half]), scale, dtype)
