"""The parameter tree: one `ParamSpec` per leaf drives loading, abstract shapes and layouts.

Layers are stacked over runs of like layers, experts over their number; linears keep the release's
orientation [out, in]. Leaves are plain arrays or `Packed` (stored formats), by choice at loading.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.model.layers import rope_table
from deepinfer_jax.ops.experts import ExpertWeights


@flax.struct.dataclass
class HyperConnection:
    """fn [s(s+2), s d], base [s(s+2)], scale [3], all float32."""

    fn: Any
    base: Any
    scale: Any


@flax.struct.dataclass
class Attention:
    """Projections and sink of one attention layer; shapes in `layer_specs`."""

    wq_a: Any
    q_norm: Any
    wq_b: Any
    wkv: Any
    kv_norm: Any
    sink: Any
    wo_a: Any
    wo_b: Any


@flax.struct.dataclass
class Compressor:
    """wkv [k, d], wgate [k, d] (ratio 2 only, else None), norm [k]."""

    wkv: Any
    wgate: Any
    norm: Any


@flax.struct.dataclass
class Indexer:
    """wq_b, weights_proj, and (kv sources only) wk, k_norm."""

    wq_b: Any
    weights_proj: Any
    wk: Any
    k_norm: Any


@flax.struct.dataclass
class Moe:
    """Router, routed experts and the shared expert of one layer.

    A draft stage, whose rows are all text, has no `bias_vl`.
    """

    gate: Any
    bias: Any
    bias_vl: Any
    experts: ExpertWeights
    shared: ExpertWeights


@flax.struct.dataclass
class Engram:
    """Projection and gate weights of one Engram layer; its table is in `Params.engram_tables`."""

    wkv: Any
    q_weight: Any
    k_weight: Any


@flax.struct.dataclass
class Layer:
    """One layer, or a run of like layers with a leading axis on every leaf."""

    attn_norm: Any
    ffn_norm: Any
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn: Attention
    moe: Moe
    compressor: Compressor | None = None
    indexer: Indexer | None = None
    engram: Engram | None = None


@flax.struct.dataclass
class Drafter:
    """The DSpark draft model; its embedding and head are the network's.

    Attributes:
        main_proj: [d, taps d]; main_norm [d].
        stages: one `Layer` per stage, a leading axis of one on every leaf. Stacked, a loop over
            them would copy the experts of each stage before it reads a few.
        norm: [d], before the head.
        markov_embed, markov_head: [v, rank].
        confidence: [1, d + rank].
    """

    main_proj: Any
    main_norm: Any
    stages: tuple[Layer, ...]
    norm: Any
    markov_embed: Any
    markov_head: Any
    confidence: Any


@flax.struct.dataclass
class Params:
    """The whole network.

    Attributes:
        embed, head: [v, d]; norm [d].
        runs: one `Layer` per run of like layers, leaves stacked on axis 0.
        engram_tables: [rows, width] per Engram layer; empty when rows come from the host.
        token_map: int32 [v], compressed token ids.
        rope_plain, rope_compressed: float32 [positions, 2, rope/2].
        drafter: the draft model, or None where nothing is drafted.
    """

    embed: Any
    head: Any
    norm: Any
    runs: tuple[Layer, ...]
    engram_tables: tuple[Any, ...]
    token_map: Any
    rope_plain: Any
    rope_compressed: Any
    drafter: Drafter | None = None


@dataclass(frozen=True)
class ParamSpec:
    """One leaf of the tree.

    Attributes:
        name: tensor name in a checkpoint, without `.weight` or `.scale`; `{e}` for an expert.
        shape: [out, in] or whatever the checkpoint stores, without stacking.
        axes: logical axis names, one per dimension of `shape`.
        stored: `q8`, `q4`, `table`, `bf16` or `f32`.
        bare: the checkpoint's name has no `.weight` suffix.
        linear: the weight of an `ops.linear`, which is `Turned` when it is not packed.
        layers: layers stacked on a leading axis; empty for a leaf outside the layers.
        experts: experts stacked after the layers' axis; 0 for none.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stored: str = "bf16"
    bare: bool = False
    linear: bool = False
    layers: tuple[int, ...] = ()
    experts: int = 0

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the leaf with its stacked axes."""
        lead = (len(self.layers),) if self.layers else ()
        return (*lead, *((self.experts,) if self.experts else ()), *self.shape)

    def tensor_names(self) -> list[list[str]]:
        """Checkpoint names, [layers or 1][experts or 1]."""
        suffix = "" if self.bare else ".weight"
        return [
            [self.name.format(l=layer, e=e) + suffix for e in range(self.experts or 1)]
            for layer in (self.layers or (0,))
        ]


def layer_specs(c: ModelConfig, run: tuple[LayerPlan, ...], prefix: str = "layers") -> Layer:
    """Specs of one run of like layers, whose names in a checkpoint begin with `prefix`."""
    plan, ids = run[0], tuple(p.layer for p in run)
    d, k, s = c.hidden_size, c.head_dim, c.hc_mult
    heads, mixes, f = c.num_attention_heads, s * (s + 2), c.moe_intermediate_size

    def spec(name: str, shape: tuple[int, ...], axes: str, stored: str = "bf16", **kw: Any) -> Any:
        name = f"{prefix}.{{l}}.{name}"
        return ParamSpec(name, shape, tuple(axes.split()), stored, layers=ids, **kw)

    def linear(
        name: str, shape: tuple[int, ...], axes: str, stored: str = "bf16", **kw: Any
    ) -> Any:
        return spec(name, shape, axes, stored, linear=True, **kw)

    def hyper(kind: str) -> HyperConnection:
        return HyperConnection(
            fn=spec(f"hc_{kind}_fn", (mixes, s * d), "mix stream_model", "f32", bare=True),
            base=spec(f"hc_{kind}_base", (mixes,), "mix", "f32", bare=True),
            scale=spec(f"hc_{kind}_scale", (3,), "mix_kind", "f32", bare=True),
        )

    def mlp(name: str, stored: str, experts: int = 0) -> ExpertWeights:
        return ExpertWeights(
            w1=linear(f"{name}.w1", (f, d), "ffn model", stored, experts=experts),
            w3=linear(f"{name}.w3", (f, d), "ffn model", stored, experts=experts),
            w2=linear(f"{name}.w2", (d, f), "model ffn", stored, experts=experts),
        )

    rank, group_in = c.o_lora_rank, heads // c.o_groups * k
    attn = Attention(
        wq_a=linear("attn.wq_a", (c.q_lora_rank, d), "q_rank model", "q8"),
        q_norm=spec("attn.q_norm", (c.q_lora_rank,), "q_rank"),
        wq_b=linear("attn.wq_b", (heads * k, c.q_lora_rank), "heads q_rank", "q8"),
        wkv=linear("attn.wkv", (k, d), "head_dim model", "q8"),
        kv_norm=spec("attn.kv_norm", (k,), "head_dim"),
        sink=spec("attn.attn_sink", (heads,), "heads", "f32", bare=True),
        wo_a=spec("attn.wo_a", (c.o_groups * rank, group_in), "groups head_dim", "q8"),
        wo_b=linear("attn.wo_b", (d, c.o_groups * rank), "model groups", "q8"),
    )
    n = c.n_routed_experts
    moe = Moe(
        gate=linear("ffn.gate", (n, d), "experts model"),
        bias=spec("ffn.gate.bias", (n,), "experts", "f32", bare=True),
        bias_vl=spec("ffn.gate.bias_vl", (n,), "experts", "f32", bare=True),
        experts=mlp("ffn.experts.{e}", "q4", n),
        shared=mlp("ffn.shared_experts", "q8"),
    )
    compressor = indexer = engram = None
    if plan.owns_kv:
        compressor = Compressor(
            wkv=linear("attn.compressor.wkv", (k, d), "head_dim model"),
            wgate=linear("attn.compressor.wgate", (k, d), "head_dim model")
            if plan.ratio == 2
            else None,
            norm=spec("attn.compressor.norm", (k,), "head_dim"),
        )
    if plan.owns_index:
        ik, ih = c.index_head_dim, c.index_n_heads
        keys = plan.owns_kv
        indexer = Indexer(
            wq_b=linear("attn.indexer.wq_b", (ih * ik, c.q_lora_rank), "index_heads q_rank", "q8"),
            weights_proj=linear("attn.indexer.weights_proj", (ih, d), "index_heads model"),
            wk=linear("attn.indexer.wk", (ik, k), "index_dim head_dim") if keys else None,
            k_norm=spec("attn.indexer.k_norm", (ik,), "index_dim") if keys else None,
        )
    if plan.engram is not None:
        rows = c.engram_columns * c.engram_head_dim
        engram = Engram(
            wkv=linear("engram.wkv", ((s + 1) * d, rows), "stream_model engram", "q8"),
            q_weight=spec("engram.q_weight", (s, d), "stream model", bare=True),
            k_weight=spec("engram.k_weight", (s, d), "stream model", bare=True),
        )
    return Layer(
        attn_norm=spec("attn_norm", (d,), "model"),
        ffn_norm=spec("ffn_norm", (d,), "model"),
        hc_attn=hyper("attn"),
        hc_ffn=hyper("ffn"),
        attn=attn,
        moe=moe,
        compressor=compressor,
        indexer=indexer,
        engram=engram,
    )


def drafter_specs(c: ModelConfig) -> Drafter:
    """Specs of the draft model (draft specification, "Tensors").

    Raises ConfigError when the config describes none.
    """
    c.check_drafter()
    v, d, rank, last = c.vocab_size, c.hidden_size, c.dspark_markov_rank, len(c.stages) - 1
    taps = len(c.dspark_target_layer_ids)
    stages = [layer_specs(c.of_stages, (stage,), "mtp") for stage in c.stages]
    return Drafter(
        main_proj=ParamSpec(
            "mtp.0.main_proj", (d, taps * d), ("model", "tap_model"), "q8", linear=True
        ),
        main_norm=ParamSpec("mtp.0.main_norm", (d,), ("model",)),
        stages=tuple(replace(s, moe=replace(s.moe, bias_vl=None)) for s in stages),
        norm=ParamSpec(f"mtp.{last}.norm", (d,), ("model",)),
        markov_embed=ParamSpec(
            f"mtp.{last}.markov_head.embed", (v, rank), ("vocab", "markov_rank")
        ),
        markov_head=ParamSpec(
            f"mtp.{last}.markov_head.head", (v, rank), ("vocab", "markov_rank"), linear=True
        ),
        confidence=ParamSpec(
            f"mtp.{last}.confidence_head.proj", (1, d + rank), ("one", "model_markov_rank")
        ),
    )


def param_specs(c: ModelConfig, *, tables: bool = True, drafter: bool = False) -> Params:
    """The whole tree of specs; the three derived tables (`token_map`, ropes) are None."""
    v, d = c.vocab_size, c.hidden_size
    return Params(
        embed=ParamSpec("embed", (v, d), ("vocab", "model")),
        head=ParamSpec("head", (v, d), ("vocab", "model"), linear=True),
        norm=ParamSpec("norm", (d,), ("model",)),
        runs=tuple(layer_specs(c, run) for run in c.runs),
        engram_tables=tuple(
            ParamSpec(
                f"layers.{layer}.engram.embed",
                (rows, c.engram_head_dim),
                ("engram_rows", "engram"),
                "table",
            )
            for layer, rows in zip(c.engram_layer_ids, c.engram_num_embeddings, strict=True)
        )
        if tables
        else (),
        token_map=None,
        rope_plain=None,
        rope_compressed=None,
        drafter=drafter_specs(c) if drafter else None,
    )


def build_params(
    config: ModelConfig,
    leaf: Callable[[ParamSpec], Any],
    *,
    token_map: Any,
    positions: int,
    tables: bool = True,
    drafter: bool = False,
) -> Params:
    """Fill the tree: `leaf` turns each spec into an array, a `Packed` or an abstract shape."""
    specs = param_specs(config, tables=tables, drafter=drafter)
    tree = jax.tree.map(leaf, specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return tree.replace(
        token_map=token_map,
        rope_plain=rope_table(config, positions, compressed=False),
        rope_compressed=rope_table(config, positions, compressed=True),
    )
