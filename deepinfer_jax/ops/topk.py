"""`topk(scores, k) -> ids`: the k best columns of each row, ascending, -1 where there are fewer.

scores float32 [n, m], -inf = not selectable; ids int32 [n, k]. Larger scores first, then the
smaller column: ties never depend on the order of evaluation (model specification, "Indexer").
"""

import jax
import jax.numpy as jnp

from deepinfer_jax.ops.kernel import Kernel


def _ascending(ids: jax.Array, valid: jax.Array, m: int) -> jax.Array:
    ordered = jnp.sort(jnp.where(valid, ids, m), axis=-1)
    return jnp.where(ordered < m, ordered, -1).astype(jnp.int32)


def _pad(ids: jax.Array, k: int) -> jax.Array:
    return jnp.pad(ids, ((0, 0), (0, k - ids.shape[-1])), constant_values=-1)


def xla(scores: jax.Array, *, k: int) -> jax.Array:
    """`lax.top_k`, whose ties go to the lower column."""
    m = scores.shape[-1]
    # -0.0 sorts below 0.0 in top_k but equals it in every comparison, so it must go.
    scores = jnp.where(scores == 0, 0.0, scores)
    values, ids = jax.lax.top_k(scores, min(k, m))
    return _pad(_ascending(ids, values > -jnp.inf, m), k)


def full_sort(scores: jax.Array, *, k: int) -> jax.Array:
    """A stable sort of whole rows; the plain reference."""
    m = scores.shape[-1]
    order = jnp.argsort(-scores, axis=-1, stable=True)[:, : min(k, m)]
    values = jnp.take_along_axis(scores, order, -1)
    return _pad(_ascending(order, values > -jnp.inf, m), k)


# Both only compare, so there is nothing that could be rounded by the company of other rows.
KERNELS = (
    Kernel("topk", "xla", xla, batch_invariant=True),
    Kernel("topk", "full_sort", full_sort, batch_invariant=True),
)
