"""`rowwise(f, x, used) -> y`: a function of single rows, applied to all rows of a step.

x is a tree of arrays [n, ...]; f takes the same tree with any number of rows and gives a tree of
arrays with as many, each row a function of that row alone. `used` int32 [] counts the rows up to
the last that matters, None for all: what y holds beyond is not defined.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel

TILE = 16  # rows that `tiles` gives to the function at a time; part of the numerics


def in_tiles(f: Callable[[Any], Any], x: Any, used: jax.Array | None = None, *, size: int) -> Any:
    """`rowwise` by a loop over `size` rows at a time, the last tile padded with zeros.

    The loop's body is compiled for `size` rows whatever n is. Its end is a traced number even
    where it is known: a loop of one turn would be merged into what stands around it, and another
    fusion may round otherwise.
    """
    n = jax.tree.leaves(x)[0].shape[0]
    spare = -n % size
    padded = jax.tree.map(lambda a: jnp.pad(a, ((0, spare), *((0, 0),) * (a.ndim - 1))), x)
    last = jax.lax.optimization_barrier(jnp.int32(n)) if used is None else used

    def part(i: jax.Array | int) -> Any:
        cut = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, i * size, size, allow_negative_indices=False),
            padded,
        )
        return jax.lax.optimization_barrier(cut)

    def run(i: jax.Array, out: Any) -> Any:
        return jax.tree.map(
            lambda a, y: jax.lax.dynamic_update_slice_in_dim(a, y, i * size, 0),
            out,
            f(part(i)),
        )

    shapes = jax.eval_shape(lambda: f(part(0)))
    out = jax.tree.map(lambda y: jnp.zeros((n + spare, *y.shape[1:]), y.dtype), shapes)
    out = jax.lax.fori_loop(0, (last + size - 1) // size, run, out)
    return jax.tree.map(lambda a: a[:n], out)


def whole(f: Callable[[Any], Any], x: Any, used: jax.Array | None = None) -> Any:
    """All rows at once, so that the compiled arithmetic depends on how many there are."""
    del used
    return f(x)


def tiles(f: Callable[[Any], Any], x: Any, used: jax.Array | None = None) -> Any:
    """Tiles of `TILE` rows, one program for all of them; tiles beyond `used` are left out."""
    return in_tiles(f, x, used, size=TILE)


KERNELS = (
    Kernel("rowwise", "whole", whole),
    Kernel("rowwise", "tiles", tiles, on=frozenset({"cpu"}), batch_invariant=True),
)
