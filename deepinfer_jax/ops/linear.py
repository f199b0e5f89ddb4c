"""`linear(x, w, quantize=...) -> y`: x [n, i], w [o, i], y [n, o] in x's dtype.

Sums are float32. With `quantize`, the input is first rounded to FP8 with a power-of-two scale per
32 channels (quantizer QA), as the release does before every Q8 and Q4 linear but wo_a.
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.packed import Turned, Weight, expand
from deepinfer_jax.ops.quant import qdq_fp8
from deepinfer_jax.ops.rowwise import TILE, in_tiles

BLOCK = 32  # inputs per partial sum of `blocks`; part of the numerics


def xla(x: jax.Array, w: Weight, *, quantize: bool = False) -> jax.Array:
    """One product over all inputs; XLA chooses the order of the sum."""
    x = qdq_fp8(x) if quantize else x
    axes, full = "ni,oi->no", expand(w, x.dtype)
    if isinstance(w, Turned):  # not turned back first: XLA would do so in memory for a single row
        axes, full = "ni,io->no", w.values.astype(x.dtype)
    y = jnp.einsum(axes, x, full, precision="highest", preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def blocks(x: jax.Array, w: Weight, *, quantize: bool = False) -> jax.Array:
    """The published order: a dot per 32 inputs, accumulated over the blocks from first to last."""
    x = qdq_fp8(x) if quantize else x
    full = expand(w, jnp.float32)
    parts = x.shape[-1] // BLOCK
    xs = jnp.moveaxis(x.astype(jnp.float32).reshape(-1, parts, BLOCK), 1, 0)
    ws = jnp.moveaxis(full.reshape(-1, parts, BLOCK), 1, 0)

    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + jnp.einsum("ni,oi->no", *pair, precision="highest"), None

    start = jnp.zeros((x.shape[0], full.shape[0]), jnp.float32)
    total, _ = jax.lax.scan(add, start, (xs, ws))
    return total.astype(x.dtype)


def row_tiles(x: jax.Array, w: Weight, *, quantize: bool = False) -> jax.Array:
    """`xla` on tiles of rows: XLA chooses the order of a sum by the shape, which is then one."""

    def product(part: jax.Array) -> jax.Array:
        return xla(part, w, quantize=quantize)

    return product(x) if x.shape[0] == TILE else in_tiles(product, x, size=TILE)


KERNELS = (
    Kernel("linear", "xla", xla),
    Kernel("linear", "row_tiles", row_tiles, on=frozenset({"cpu"}), batch_invariant=True),
    Kernel("linear", "blocks", blocks),
)
