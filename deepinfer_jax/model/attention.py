"""One attention block: its own window keys and its kv source's entries, in one softmax."""

from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import Rows, SourceCache
from deepinfer_jax.model.indexer import Selection, select
from deepinfer_jax.model.layers import rms_norm, rotate
from deepinfer_jax.model.params import Attention, Layer
from deepinfer_jax.ops.packed import expand
from deepinfer_jax.ops.quant import Decode
from deepinfer_jax.ops.sparse_mla import Keys
from deepinfer_jax.ops.table import Ops


@flax.struct.dataclass
class Shared:
    """What layers take over from the sources before them.

    Attributes:
        source: caches of the current kv source, None before the first.
        entries: int32 [n, top-k], the current index source's selection.
        candidates: bool [n, m] from the candidate source.
    """

    source: SourceCache | None = None
    entries: jax.Array | None = None
    candidates: jax.Array | None = None

    def kept(self, index: jax.Array) -> "Shared":
        """The same for the rows `index` int32 [m] alone."""
        entries, candidates = jax.tree.map(lambda x: x[index], (self.entries, self.candidates))
        return Shared(self.source, entries, candidates)


@flax.struct.dataclass
class AttentionOut:
    """Result of one block, with what a trace shows of its inside.

    Attributes:
        out: [n, d].
        shared: for the layers that follow.
        window_kv: [n, stored k], as the ring holds them; heads: [n, h, k] after the inverse
            rotation.
    """

    out: jax.Array
    shared: Shared
    window_kv: jax.Array
    heads: jax.Array
    selection: Selection | None


@flax.struct.dataclass
class Whole:
    """All rows of a step, for a layer of which only some go on but whose window keys all stay.

    Attributes:
        x: [n, d], the attention input of all rows; rows: those rows.
        index: int32 [m], places of the rows that go on; None for all.
    """

    x: jax.Array
    rows: Rows
    index: jax.Array | None


def window_keys(
    kv: jax.Array,
    ring: jax.Array,
    rows: Rows,
    window: int,
    index: jax.Array | None = None,
    *,
    decode: Decode,
) -> Keys:
    """The last `window` positions of every row, its own included.

    Rows of this step are taken from `kv` [n, stored k], earlier ones from `ring`
    [slots, r, stored k] as it was before the step: a chunk may be longer than the ring. `index`
    int32 [m] are the places in `kv` of rows that are only a part of it.
    """
    n, size = kv.shape[0], ring.shape[1]
    position, in_step, row = rows.back(jnp.arange(window, dtype=jnp.int32), index)
    stored = n + rows.slot[:, None] * size + position % size
    return Keys(
        pool=jnp.concatenate([kv, ring.reshape(-1, ring.shape[-1])]),
        at=jnp.where(in_step, row, stored),
        visible=position >= jnp.maximum(rows.floor, 0)[:, None],
        decode=decode,
    )


def entry_keys(
    source: SourceCache, table: jax.Array, entries: jax.Array, rows: Rows, *, decode: Decode
) -> Keys:
    """The selected entries of every row; `table` int32 [slots, pages]."""
    return Keys(
        pool=source.entries.reshape(-1, source.entries.shape[-1]),
        at=source.flat(table, rows.slot[:, None], jnp.maximum(entries, 0)),
        visible=entries >= 0,
        decode=decode,
    )


def queries(
    x: jax.Array,
    angles: jax.Array,
    params: Attention,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> tuple[jax.Array, jax.Array]:
    """Low-rank queries [n, q rank] and rotated heads [n, h, k] of x [n, d], row by row."""
    quantize = arithmetic.quantize_inputs
    rank = ops.linear(x, params.wq_a, quantize=quantize)
    rank = rms_norm(rank, params.q_norm, config.rms_norm_eps)
    heads = ops.linear(rank, params.wq_b, quantize=quantize)
    heads = heads.reshape(x.shape[0], config.num_attention_heads, config.head_dim)
    return rank, rotate(heads, angles)


def own_keys(
    x: jax.Array,
    angles: jax.Array,
    params: Attention,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> jax.Array:
    """Window keys [n, stored k] of x [n, d], row by row, as a ring holds them."""
    kv = ops.linear(x, params.wkv, quantize=arithmetic.quantize_inputs)
    kv = rms_norm(kv, params.kv_norm, config.rms_norm_eps)
    return arithmetic.caches.window.encode(rotate(kv, angles))


def project(
    heads: jax.Array,
    angles: jax.Array,
    params: Attention,
    *,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> tuple[jax.Array, jax.Array]:
    """Heads [n, h, k] rotated back, and the block's output [n, d], row by row."""
    n, dtype = heads.shape[0], heads.dtype
    heads = rotate(heads, angles, inverse=True)
    grouped = heads.reshape(n, config.o_groups, -1)
    wo_a = expand(params.wo_a, dtype).reshape(config.o_groups, config.o_lora_rank, -1)
    low = jnp.einsum(
        "ngi,gri->ngr", grouped, wo_a, precision="highest", preferred_element_type=jnp.float32
    )
    low = low.astype(dtype).reshape(n, -1)
    return heads, ops.linear(low, params.wo_b, quantize=arithmetic.quantize_inputs)


def attention(
    x: jax.Array,
    params: Layer,
    rows: Rows,
    ring: jax.Array,
    table: jax.Array,
    shared: Shared,
    rope: jax.Array,
    whole: Whole | None = None,
    *,
    plan: LayerPlan,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> AttentionOut:
    """Attention of the rows x [n, d] (normed) (model specification, "Attention").

    Args:
        ring: [slots, r, stored k], this layer's window cache as it was before the step.
        table: int32 [slots, pages], the sequences' page tables.
        rope: float32 [positions, 2, rope/2], this kind of layer's table.
        whole: all rows of the step, when x is a part of them and all leave window keys.
    """
    p, caches, angles = params.attn, arithmetic.caches, rope[rows.position]
    common = {"config": config, "arithmetic": arithmetic, "ops": ops}
    q_rank, q = ops.rowwise(lambda part: queries(*part, params=p, **common), (x, angles), rows.used)
    near = (x, rows) if whole is None else (whole.x, whole.rows)
    near_angles = rope[near[1].position]
    kv = ops.rowwise(
        lambda part: own_keys(*part, params=p, **common), (near[0], near_angles), near[1].used
    )

    selection = None
    if plan.owns_index:
        assert params.indexer is not None and shared.source is not None
        selection = select(
            x,
            q_rank,
            params.indexer,
            rows,
            shared.source.index_keys,
            table,
            angles,
            shared.candidates,
            plan=plan,
            **common,
        )
        shared = replace(shared, entries=selection.entries, candidates=selection.candidates)

    seen, index = rows, None
    if whole is not None:
        seen, index = whole.rows, whole.index
        if index is not None:
            seen = jax.tree.map(lambda r: r[index], seen)
    window = window_keys(kv, ring, seen, config.sliding_window, index, decode=caches.window.decode)
    entries = None
    if plan.ratio:
        assert shared.source is not None and shared.entries is not None
        entries = entry_keys(shared.source, table, shared.entries, rows, decode=caches.entry.decode)
    heads = ops.sparse_mla(q, window, entries, p.sink, scale=config.head_dim**-0.5)
    heads, out = ops.rowwise(
        lambda part: project(*part, params=p, **common), (heads, angles), rows.used
    )
    return AttentionOut(out, shared, kv, heads, selection)
