"""How the caches hold keys: as numbers of one type, or as the release's records.

A cache holds exactly the values that the arithmetic defines, whatever its format. What an
arithmetic rounds is exact in bfloat16 and is what a record says (model specification, "What is
quantized in the reference forward"); what it does not round is exact in float32 alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from deepinfer_jax.ops import quant


@dataclass(frozen=True)
class KeyFormat:
    """How one kind of key is stored; hashable: its functions are made once, at import.

    Attributes:
        dtype: of the stored array.
        encode: keys [..., k] -> stored [..., size(k)], rounded as the arithmetic rounds them.
        decode: (stored, dtype) -> keys [..., k] of that dtype.
        per_code: channels that share one stored element.
        group: channels that share a scale, which takes one more; 0 without scales.
    """

    dtype: jnp.dtype
    encode: Callable[[jax.Array], jax.Array] = field(repr=False)
    decode: quant.Decode = field(repr=False)
    per_code: int = 1
    group: int = 0

    def size(self, k: int) -> int:
        """Stored elements of one key of k channels."""
        return k // self.per_code + (k // self.group if self.group else 0)

    def nbytes(self, k: int) -> int:
        """Bytes of one key of k channels."""
        return self.size(k) * self.dtype.itemsize


@dataclass(frozen=True)
class CacheFormat:
    """The formats of all keys that are kept between steps.

    Attributes:
        name: `f32`, `bf16` or `release`.
        window: of window keys; entry: of main compressed KV; index_key: of index keys.
    """

    name: str
    window: KeyFormat
    entry: KeyFormat
    index_key: KeyFormat


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def _rounded(rounding: Callable[[jax.Array], jax.Array], dtype: jnp.dtype) -> KeyFormat:
    def encode(x: jax.Array) -> jax.Array:
        return rounding(x).astype(dtype)

    return KeyFormat(dtype, encode, quant.numbers)


def _rounded_format(name: str, dtype: jnp.dtype) -> CacheFormat:
    kinds = quant.qdq_fp8, quant.qdq_fp4_e4m3, quant.qdq_fp4
    return CacheFormat(name, *(_rounded(rounding, dtype) for rounding in kinds))


_F32, _BF16, _BYTE = (jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.uint8))
_SAME = KeyFormat(_F32, _unchanged, quant.numbers)
RELEASE = CacheFormat(
    "release",
    KeyFormat(_BYTE, quant.encode_fp8, quant.decode_fp8, per_code=1, group=32),
    KeyFormat(_BYTE, quant.encode_fp4_e4m3, quant.decode_fp4_e4m3, per_code=2, group=16),
    KeyFormat(_BYTE, quant.encode_fp4, quant.decode_fp4, per_code=2, group=32),
)

# The formats that hold what an arithmetic defines, by name: of one that leaves keys as they are,
# and of those that round them.
UNROUNDED = {"f32": CacheFormat("f32", _SAME, _SAME, _SAME)}
ROUNDED = {
    "f32": _rounded_format("f32", _F32),
    "bf16": _rounded_format("bf16", _BF16),
    "release": RELEASE,
}
