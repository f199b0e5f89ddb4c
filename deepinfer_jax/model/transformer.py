"""The forward of the network: rows in, hidden states and new caches out.

One function serves prefill chunks and single tokens alike: each row brings its position and slot,
and the caches hold what came before (model specification, "Top-level forward").
"""

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.attention import AttentionOut, Shared, Whole, attention
from deepinfer_jax.model.cache import Cache, Rows
from deepinfer_jax.model.compressor import Compressed, compress
from deepinfer_jax.model.engram import engram, engram_rows
from deepinfer_jax.model.feed_forward import feed_forward
from deepinfer_jax.model.layers import rms_norm
from deepinfer_jax.model.params import Layer, Params
from deepinfer_jax.model.streams import Residual, collapse, start_streams
from deepinfer_jax.ops.packed import expand
from deepinfer_jax.ops.table import Ops

Trace = dict[str, jax.Array]


@dataclass(frozen=True)
class Network:
    """What a forward is built from besides its arrays; hashable, so a static argument.

    Attributes:
        traced: record the arrays named in the golden data, layer by layer.
        drafter: parameters and caches hold the draft model too.
    """

    config: ModelConfig
    arithmetic: Arithmetic
    ops: Ops
    traced: bool = False
    drafter: bool = False


@flax.struct.dataclass
class ForwardOut:
    """Result of a forward over n rows, of which the decoder's layers took m.

    Attributes:
        hidden: [m, d], collapsed streams before the final norm.
        taps: [taps, m, d], stream means at the inputs of the drafter's target layers, of the m rows
            alone also where the layer took all.
        cache: the caches with this step's rows written.
        trace: named arrays when traced, else empty; layer arrays are called `L{l}.name`.
    """

    hidden: jax.Array
    taps: jax.Array
    cache: Cache
    trace: Trace


@flax.struct.dataclass
class Injected:
    """Residuals that replace the computed ones at the input of some layers, for comparisons.

    Attributes:
        given: bool [layers].
        residual: streams [layers, n, s, d] and pre [layers, n, s].
    """

    given: jax.Array
    residual: Residual


@flax.struct.dataclass
class Inputs:
    """What every layer of a step sees unchanged.

    Attributes:
        rows: the step's tokens.
        is_image: bool [n].
        memory: looked-up Engram rows [n, columns * width] per Engram layer.
        table: int32 [slots, pages], the sequences' page tables.
        rope_plain, rope_compressed: tables of the two kinds of layers.
        injected: for comparisons, or None.
    """

    rows: Rows
    is_image: jax.Array
    memory: tuple[jax.Array, ...]
    table: jax.Array
    rope_plain: jax.Array
    rope_compressed: jax.Array
    injected: Injected | None


@flax.struct.dataclass
class Kept:
    """The rows that go on through the decoder's layers (model specification, "CED").

    Attributes:
        index: int32 [m], their places among the step's rows; padding may point anywhere. None:
            all rows go on, seen as `rows` describes them.
        rows: the same rows as the decoder sees them, with its own window floors.
        first_exact: the decoder's first layer keeps the window keys of all rows, and its rows see
            them; else it is truncated as the layers after it are.
    """

    index: jax.Array | None
    rows: Rows
    first_exact: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class LayerOut:
    """Result of one layer; `window_kv` [n, stored k] is for its ring, `mean` [n, d] of its inputs.

    A run of layers gives these two and the trace a leading axis of layers.
    """

    residual: Residual
    shared: Shared
    window_kv: jax.Array
    mean: jax.Array
    trace: Trace


def _attention_trace(
    attn: AttentionOut, compressed: Compressed | None, plan: LayerPlan, arithmetic: Arithmetic
) -> Trace:
    caches, dtype = arithmetic.caches, arithmetic.dtype
    trace = {"attn_o": attn.heads, "attn_out": attn.out}
    trace["window_kv"] = caches.window.decode(attn.window_kv, dtype)
    if compressed is not None:
        trace["latent"] = compressed.latent
        trace["compress_kv"] = caches.entry.decode(compressed.entry, dtype)
        trace["index_k"] = caches.index_key.decode(compressed.index_key, dtype)
    if attn.selection is not None:
        trace["index_q"] = attn.selection.query
        trace["topk"] = attn.selection.entries
        if plan.writes_candidates and attn.selection.candidates is not None:
            trace["candidates"] = attn.selection.candidates
    return trace


def layer(
    residual: Residual,
    params: Layer,
    inputs: Inputs,
    ring: jax.Array,
    index: jax.Array | int,
    shared: Shared,
    kept: Kept | None = None,
    *,
    plan: LayerPlan,
    net: Network,
) -> LayerOut:
    """One layer: Engram where it has one, then attention and mixture in their hyper-connections.

    A layer that owns a kv source writes its entries for all rows; with `kept` it does the rest for
    those rows alone.

    Args:
        residual: the streams entering the layer.
        params: this layer's weights.
        inputs: what all layers share.
        ring: [layers, slots, r, stored k], window caches of all layers before the step.
        index: this layer's place in `ring`; a traced value inside a scan.
        shared: what the sources before this layer left.
        kept: rows that go on, at the decoder's first layer; None keeps all.
        plan: the layer's static plan; inside a scan, that of the run's first layer.
        net: configuration, arithmetic and kernels.
    """
    eps, ops = net.config.rms_norm_eps, net.ops
    common = {"config": net.config, "arithmetic": net.arithmetic, "ops": ops}
    trace: Trace = {}
    if inputs.injected is not None:
        given = inputs.injected.given[index]
        residual = jax.tree.map(
            lambda new, old: jnp.where(given, new[index], old), inputs.injected.residual, residual
        )
    memory = None if plan.engram is None else inputs.memory[plan.engram]

    def enter(part: tuple[Residual, jax.Array | None, jax.Array]) -> tuple[Any, ...]:
        residual, memory, is_image = part
        gate = None
        if memory is not None:
            assert params.engram is not None
            gated = engram(residual.streams, memory, params.engram, is_image, **common)
            residual, gate = replace(residual, streams=gated.streams), gated.gate
        return residual, gate, rms_norm(collapse(residual), params.attn_norm, eps)

    entered = ops.rowwise(enter, (residual, memory, inputs.is_image), inputs.rows.used)
    residual, gate, attn_in = entered
    if net.traced and memory is not None:
        trace |= {"engram_rows": memory, "engram_gate": gate, "engram_out": residual.streams}
    rope = inputs.rope_compressed if plan.ratio else inputs.rope_plain
    compressed = None
    if plan.owns_kv:
        assert params.compressor is not None and params.indexer is not None
        assert shared.source is not None
        with jax.named_scope("compress"):
            compressed, source = compress(
                attn_in,
                params.compressor,
                params.indexer,
                inputs.rows,
                shared.source,
                inputs.table,
                rope,
                ratio=plan.ratio,
                **common,
            )
        shared = replace(shared, source=source)
    whole = None
    if kept is not None:
        if kept.first_exact:
            whole = Whole(attn_in, inputs.rows, kept.index)
        if kept.index is not None:
            residual, attn_in = jax.tree.map(lambda x: x[kept.index], (residual, attn_in))
            shared = shared.kept(kept.index)
            inputs = replace(inputs, is_image=inputs.is_image[kept.index])
        inputs = replace(inputs, rows=kept.rows)
    with jax.named_scope("attention"):
        attn = attention(
            attn_in,
            params,
            inputs.rows,
            ring[index],
            inputs.table,
            shared,
            rope,
            whole,
            plan=plan,
            **common,
        )

    left = feed_forward(
        residual.streams, attn.out, params, inputs.is_image, inputs.rows.valid, **common
    )
    if net.traced:
        trace |= _attention_trace(attn, compressed, plan, net.arithmetic)
        trace |= {"attn_in": attn_in} | left.trace
    return LayerOut(left.residual, attn.shared, attn.window_kv, left.mean, trace)


def _run_layers(
    residual: Residual,
    params: Layer,
    inputs: Inputs,
    ring: jax.Array,
    shared: Shared,
    kept: Kept | None,
    *,
    run: tuple[LayerPlan, ...],
    net: Network,
) -> LayerOut:
    """One run of like layers; `kept` for a run that begins the decoder."""
    if len(run) == 1:
        one = jax.tree.map(lambda leaf: leaf[0], params)
        out = layer(residual, one, inputs, ring, run[0].layer, shared, kept, plan=run[0], net=net)
        lead = {name: value[None] for name, value in out.trace.items()}
        return replace(out, window_kv=out.window_kv[None], mean=out.mean[None], trace=lead)

    assert kept is None, "a layer that owns a kv source is a run of its own"

    def body(carry: Any, step: Any) -> Any:
        residual = carry
        one, index = step
        out = layer(residual, one, inputs, ring, index, shared, plan=run[0], net=net)
        return out.residual, (out.window_kv, out.mean, out.trace)

    ids = jnp.asarray([plan.layer for plan in run], jnp.int32)
    residual, (kv, means, trace) = jax.lax.scan(body, residual, (params, ids))
    return LayerOut(residual, shared, kv, means, trace)


def decoder_start(config: ModelConfig) -> int:
    """The decoder's first layer: the first one whose kv source keeps every position."""
    ratios = config.compress_ratios
    return ratios.index(1) if 1 in ratios else config.num_hidden_layers


def _write_windows(ring: jax.Array, written: list[tuple[jax.Array, Rows]]) -> jax.Array:
    """The rings [layers, slots, r, stored k] with each run's keys of its rows."""
    size, at = ring.shape[2], 0
    while written:
        rows = written[0][1]
        same = [kv for kv, r in written if r is rows]
        written = written[len(same) :]
        kv = jnp.concatenate(same)
        layers = slice(at, at + kv.shape[0])
        place = rows.writable(size), rows.position % size
        ring = ring.at[layers, *place].set(kv, mode="drop")
        at += kv.shape[0]
    return ring


def forward(
    params: Params,
    cache: Cache,
    rows: Rows,
    memory: tuple[jax.Array, ...] | None = None,
    injected: Injected | None = None,
    kept: Kept | None = None,
    *,
    net: Network,
) -> ForwardOut:
    """Run all layers on the rows of one step.

    Args:
        params: the network.
        cache: state of the slots before this step.
        rows: the step's tokens.
        memory: looked-up Engram rows [n, columns * width] per Engram layer, when the tables are
            not on the device (`params.engram_tables` is empty).
        injected: residuals to compare layer by layer.
        kept: the rows that the decoder's layers run; None runs all.
        net: configuration, arithmetic and kernels.
    """
    config = net.config
    n = rows.ids.shape[0]
    is_image = jnp.zeros((n,), bool)
    if config.image_token_id is not None:
        is_image = rows.ids == config.image_token_id
    embedded = params.embed[rows.ids].astype(net.arithmetic.dtype)

    with jax.named_scope("engram_lookup"):
        found, history = engram_rows(rows, params.token_map, cache.history, config)
        if params.engram_tables:
            memory = tuple(
                expand(table[found[:, i]], net.arithmetic.dtype).reshape(n, -1)
                for i, table in enumerate(params.engram_tables)
            )
    memory = memory or ()
    assert len(memory) == len(config.engram_layer_ids), "Engram rows are neither held nor given"
    trace: Trace = {"embed": embedded, "engram_hash": found} if net.traced else {}

    inputs = Inputs(
        rows,
        is_image,
        memory,
        cache.table,
        params.rope_plain,
        params.rope_compressed,
        injected,
    )
    residual, shared = start_streams(embedded, config.hc_mult), Shared()
    first, goes_on = decoder_start(config), rows if kept is None else kept.rows
    sources, taps = list(cache.sources), []
    written: list[tuple[jax.Array, Rows]] = []
    place = {layer: i for i, layer in enumerate(config.kv_source_layer_ids)}
    for run, run_params in zip(config.runs, params.runs, strict=True):
        plan = run[0]
        if plan.owns_kv:
            shared = replace(shared, source=sources[place[plan.layer]])
        part = kept if plan.layer == first else None
        with jax.named_scope(f"layers_{plan.layer}_{run[-1].layer}"):
            out = _run_layers(
                residual, run_params, inputs, cache.window, shared, part, run=run, net=net
            )
        residual, shared = out.residual, out.shared
        if part is not None:
            assert not any(p.engram is not None for p in config.layers[first:])
            goes_on_image = is_image if part.index is None else is_image[part.index]
            inputs = replace(inputs, rows=goes_on, is_image=goes_on_image)
        near = rows if part is not None and part.first_exact else inputs.rows
        written.append((out.window_kv, near))
        if plan.owns_kv:
            assert shared.source is not None
            sources[place[plan.layer]] = shared.source
        means = out.mean
        if kept is not None and kept.index is not None and plan.layer < first:
            means = means[:, kept.index]
        taps += [means[i] for i, p in enumerate(run) if p.tap]
        for name, value in out.trace.items():
            trace |= {f"L{p.layer}.{name}": value[i] for i, p in enumerate(run)}
    hidden = net.ops.rowwise(collapse, residual, goes_on.used)
    # All layers read the rings as they were; written after the last read, they need no copy.
    ring, hidden = jax.lax.optimization_barrier((cache.window, hidden))
    ring = _write_windows(ring, written)
    return ForwardOut(
        hidden=hidden,
        taps=jnp.stack(taps) if taps else jnp.zeros((0, *hidden.shape), hidden.dtype),
        cache=replace(cache, window=ring, sources=tuple(sources), history=history),
        trace=trace,
    )


def unembed(params: Params, hidden: jax.Array, net: Network) -> jax.Array:
    """Logits float32 [n, v] of hidden [n, d]: final norm, then a float32 product."""

    def logits(hidden: jax.Array) -> jax.Array:
        normed = rms_norm(hidden, params.norm, net.config.rms_norm_eps).astype(jnp.float32)
        return net.ops.linear(normed, params.head)

    return net.ops.rowwise(logits, hidden)
