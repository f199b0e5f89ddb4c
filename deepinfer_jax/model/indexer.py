"""Which compressed entries a row attends to: index scores, candidate blocks, selection."""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import Rows
from deepinfer_jax.model.layers import rotate
from deepinfer_jax.model.params import Indexer
from deepinfer_jax.ops.quant import qdq_fp4
from deepinfer_jax.ops.table import Ops


@flax.struct.dataclass
class Selection:
    """One index source's answer.

    Attributes:
        entries: int32 [n, top-k], ascending, -1 = none.
        query: [n, index heads, index k], after RoPE and rounding.
        candidates: bool [n, m], entries that later index sources may choose; None before the
            candidate source.
    """

    entries: jax.Array
    query: jax.Array
    candidates: jax.Array | None


def candidate_blocks(
    scores: jax.Array, visible: jax.Array, *, block: int, keep: int, ops: Ops
) -> jax.Array:
    """Entries inside the `keep` best blocks, bool [n, m].

    A block scores its best entry; the one that holds the newest visible entry always stays (model
    specification, "Two-level candidates").

    Args:
        scores: float32 [n, m], -inf where not visible.
        visible: int32 [n], number of visible entries.
    """
    n, m = scores.shape
    blocks = -(-m // block)
    padded = jnp.pad(scores, ((0, 0), (0, blocks * block - m)), constant_values=-jnp.inf)
    best = padded.reshape(n, blocks, block).max(-1)
    newest = (visible[:, None] - 1) // block == jnp.arange(blocks)
    best = jnp.where(newest & (visible[:, None] > 0), jnp.inf, best)
    chosen = ops.topk(best, k=keep)
    hit = jnp.zeros((n, blocks), bool)
    at = jnp.where(chosen < 0, blocks, chosen)
    hit = hit.at[jnp.arange(n)[:, None], at].set(True, mode="drop")
    return jnp.repeat(hit, block, -1)[:, :m]


def select(
    x: jax.Array,
    q_rank: jax.Array,
    params: Indexer,
    rows: Rows,
    index_keys: jax.Array,
    table: jax.Array,
    angles: jax.Array,
    candidates: jax.Array | None,
    *,
    plan: LayerPlan,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> Selection:
    """Choose each row's entries among those that are visible at its position.

    Args:
        x: [n, d], the layer's normed attention input.
        q_rank: [n, q rank], the layer's normed low-rank query.
        index_keys: [pages, entries a page, stored index k] of the layer's kv source.
        table: int32 [slots, pages], the sequences' page tables; m counts the entries they hold.
        angles: float32 [n, 2, rope/2] at the rows' positions.
        candidates: from the candidate source, for layers after it.
    """
    heads, width = config.index_n_heads, config.index_head_dim

    def ask(x: jax.Array, q_rank: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        query = ops.linear(q_rank, params.wq_b, quantize=arithmetic.quantize_inputs)
        query = rotate(query.reshape(-1, heads, width), angles)
        if arithmetic.quantize_caches:
            query = qdq_fp4(query)
        weight = ops.linear(x, params.weights_proj) * jnp.asarray(
            width**-0.5 * heads**-0.5, arithmetic.dtype
        )
        return query, weight

    query, weight = ops.rowwise(lambda part: ask(*part), (x, q_rank, angles), rows.used)
    visible = (rows.position + 1) // plan.ratio
    scores = ops.index_scores(
        query,
        weight,
        index_keys,
        table,
        rows.slot,
        visible,
        round_scores=arithmetic.round_scores,
        decode=arithmetic.caches.index_key.decode,
    )
    seen = jnp.arange(scores.shape[1]) < visible[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if plan.writes_candidates:
        candidates = candidate_blocks(
            scores,
            visible,
            block=config.candidate_block_size,
            keep=config.candidate_topk_blocks,
            ops=ops,
        )
    if plan.uses_candidates:
        assert candidates is not None, "the candidate source comes first"
        scores = jnp.where(candidates, scores, -jnp.inf)
    return Selection(ops.topk(scores, k=config.index_topk), query, candidates)
