"""The stream-mixing matrix of mHC on a GPU: a Sinkhorn kernel with its exact gradient.

The gradient goes through all iterations. An implicit one assumes a converged fixed point, which
20 iterations are not once the softmax saturates.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Lanes = tuple[jax.Array, ...]

_BLOCK = 128  # tokens a program of the kernel; 4 warps, one token a thread


def sinkhorn_kernel(
    c: jax.Array, iterations: int, eps: float, interpret: bool = False
) -> jax.Array:
    """`ops.mhc.sinkhorn`, one GPU kernel each way.

    Args:
        c: float32 [tokens, n, n], row = source stream, column = target stream, before the softmax
            over columns.
        iterations: column normalisations in all; the first follows the softmax.
        eps: added to every entry after the softmax and to every sum.
        interpret: run it without a GPU.

    Returns:
        float32 [tokens, n, n] whose columns sum to about 1 (model specification, section "mixes").
    """
    return _kernel_vjp(c, iterations, eps, interpret)


def _kernel(c: jax.Array, iterations: int, eps: float, interpret: bool) -> jax.Array:
    return _call(_forward_kernel, (c,), iterations, eps, interpret)


def _kernel_forward(
    c: jax.Array, iterations: int, eps: float, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    return _call(_forward_kernel, (c,), iterations, eps, interpret), c


def _kernel_backward(
    iterations: int, eps: float, interpret: bool, c: jax.Array, g: jax.Array
) -> tuple[jax.Array]:
    return (_call(_backward_kernel, (c, g), iterations, eps, interpret),)


_kernel_vjp = jax.custom_vjp(_kernel, nondiff_argnums=(1, 2, 3))
_kernel_vjp.defvjp(_kernel_forward, _kernel_backward)


def _call(
    kernel: Callable[..., None],
    arrays: tuple[jax.Array, ...],
    iterations: int,
    eps: float,
    interpret: bool,
) -> jax.Array:
    tokens, n, _ = arrays[0].shape
    padding = ((0, -tokens % _BLOCK), (0, 0))
    flat = [a.reshape(tokens, n * n) for a in arrays]
    flat = [jnp.pad(a, padding) for a in flat] if padding[0][1] else flat
    spec = pl.BlockSpec((_BLOCK, n * n), lambda i: (i, 0))
    out = pl.pallas_call(
        partial(kernel, n=n, iterations=iterations, eps=eps),
        grid=(flat[0].shape[0] // _BLOCK,),
        in_specs=[spec] * len(flat),
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(flat[0].shape, jnp.float32),
        interpret=interpret,
        # Naming Triton's parameters also settles which of the two GPU compilers is used.
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="sinkhorn",
    )(*flat)
    return out[:tokens].reshape(tokens, n, n)


# Inside the kernel every matrix entry is its own vector of tokens: entry i * n + j is [i, j].


def _read(ref: jax.Array, count: int) -> Lanes:
    return tuple(ref[:, k] for k in range(count))


def _normalise(c: Lanes, n: int, eps: float, *, rows: bool) -> Lanes:
    out = list(c)
    for i in range(n):
        members = [i * n + j if rows else j * n + i for j in range(n)]
        inverse = 1.0 / (sum(c[m] for m in members[1:]) + c[members[0]] + eps)
        for m in members:
            out[m] = c[m] * inverse
    return tuple(out)


def _start(c: Lanes, n: int, eps: float) -> Lanes:
    out: list[jax.Array] = []
    for i in range(n):
        row = c[i * n : (i + 1) * n]
        top = row[0]
        for x in row[1:]:
            top = jnp.maximum(top, x)
        top = jax.lax.stop_gradient(top)  # it cancels in the quotient
        exps = [jnp.exp(x - top) for x in row]
        inverse = 1.0 / (sum(exps[1:]) + exps[0])
        out += [e * inverse + eps for e in exps]
    return _normalise(tuple(out), n, eps, rows=False)


def _iterate(c: Lanes, n: int, eps: float) -> Lanes:
    return _normalise(_normalise(c, n, eps, rows=True), n, eps, rows=False)


def _forward_kernel(
    c_ref: jax.Array, out_ref: jax.Array, *, n: int, iterations: int, eps: float
) -> None:
    c = _start(_read(c_ref, n * n), n, eps)
    c = jax.lax.fori_loop(0, iterations - 1, lambda _, x: _iterate(x, n, eps), c)
    for k, x in enumerate(c):
        out_ref[:, k] = x


def _backward_kernel(
    c_ref: jax.Array, g_ref: jax.Array, out_ref: jax.Array, *, n: int, iterations: int, eps: float
) -> None:
    first, pull_start = jax.vjp(lambda *c: _start(c, n, eps), *_read(c_ref, n * n))

    def step(i: jax.Array, g: Lanes) -> Lanes:
        # Recomputing the iterates from the start keeps a few n^2 registers live, not 40 n^2.
        c = jax.lax.fori_loop(0, iterations - 2 - i, lambda _, x: _iterate(x, n, eps), first)
        return jax.vjp(lambda *x: _iterate(x, n, eps), *c)[1](g)

    g = jax.lax.fori_loop(0, iterations - 1, step, _read(g_ref, n * n))
    for k, x in enumerate(pull_start(g)):
        out_ref[:, k] = x
