"""Weights kept in the release's stored formats or turned, and their exact expansion.

Q8: FP8 E4M3 codes with one E8M0 scale per 32x32 block. Q4: two E2M1 codes a byte (even input in
the low nibble) with one E8M0 scale per 32 inputs. Tables: FP8 E4M3 codes with one scale per 32
channels of a row (model specification, section "Number formats").
"""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.ops.quant import e2m1_values, power_of_two


@flax.struct.dataclass
class Packed:
    """A quantized linear weight [..., o, i] or table [rows, i].

    Attributes:
        codes: float8_e4m3fn [..., o, i] (Q8, table) or uint8 [..., o, i/2] (Q4).
        scale: uint8 E8M0 bytes, [..., o/32, i/32] (Q8) or [..., o, i/32] (Q4, table).
    """

    codes: jax.Array
    scale: jax.Array

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """The weight's exact values [..., o, i]; every one is representable in bfloat16."""
        scale = power_of_two(self.scale)
        if self.codes.dtype == jnp.uint8:
            values = e2m1_values(self.codes)
        else:
            values = self.codes.astype(jnp.float32)
            if scale.shape[-2] != values.shape[-2]:
                scale = jnp.repeat(scale, 32, -2)
        return (values * jnp.repeat(scale, 32, -1)).astype(dtype)

    def __getitem__(self, at: jax.Array) -> "Packed":
        """Parts along the first axis: layers or experts of a stack, rows of a table."""
        return Packed(self.codes[at], self.scale[at])


@flax.struct.dataclass
class Turned:
    """A plain linear weight [..., o, i] that is held with its inputs first.

    A CPU multiplies few rows by it as it lies. The other way round it repacks the weight for every
    product, which takes longer than the product.

    Attributes:
        values: [..., i, o].
    """

    values: jax.Array


Weight = jax.Array | Packed | Turned


def expand(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """`weight` as a plain array of `dtype`."""
    if isinstance(weight, Packed):
        return weight.dequantize(dtype)
    if isinstance(weight, Turned):
        return jnp.swapaxes(weight.values, -1, -2).astype(dtype)
    return weight.astype(dtype)
