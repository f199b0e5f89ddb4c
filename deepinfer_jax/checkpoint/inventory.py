"""Which tensors a checkpoint must hold, derived from the model's configuration alone."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from deepinfer_jax.checkpoint.formats import GROUP
from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.errors import ConfigError

Kind = Literal["plain", "q8", "q4", "engram_table"]
Spelling = Literal["release", "dequantized"]

_BF16 = ("BF16",)
_F32 = ("F32",)
_EITHER = ("BF16", "F32")  # exporters disagree about these, and both are read as they are
_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclass(frozen=True)
class StoredSpec:
    """What one stored tensor must look like: its shape and the types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the first, the release's own, of the allowed types."""
        return _size(self.shape) * _BYTES[self.dtypes[0]]


@dataclass(frozen=True)
class TensorSpec:
    """One weight of the network.

    Attributes:
        shape: of the weight itself, [out, in] for a linear, whatever it is packed into.
        dtypes: safetensors types that a plain tensor, or a dequantized one, may have.
        kind: `q8`, `q4` and `engram_table` weights carry scales in the release spelling.
        component: the part of the network it is counted under.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    kind: Kind
    component: str

    @property
    def parameters(self) -> int:
        """Number of weights; scales are not counted."""
        return _size(self.shape)

    def stored(self, name: str, spelling: Spelling) -> dict[str, StoredSpec]:
        """The tensor, or codes and scales, that `spelling` stores for the weight `name`."""
        if self.kind == "plain" or spelling == "dequantized":
            return {name: StoredSpec(self.shape, self.dtypes)}
        o, i = self.shape
        if i % GROUP or (self.kind == "q8" and o % GROUP):
            raise ConfigError(
                f"{name} would be {o} x {i}, which does not divide into blocks of {GROUP}.",
                "The release formats keep one scale per block and have no partial blocks.",
                f"Use widths that are multiples of {GROUP}.",
            )
        codes = {
            "q8": StoredSpec((o, i), ("F8_E4M3",)),
            "q4": StoredSpec((o, i // 2), ("I8",)),
            "engram_table": StoredSpec((o, i), ("F8_E4M3",)),
        }[self.kind]
        rows = o // GROUP if self.kind == "q8" else o
        return {name: codes, scale_name(name): StoredSpec((rows, i // GROUP), ("F8_E8M0",))}


@dataclass(frozen=True)
class ComponentSize:
    """Weights (scales not counted) and bytes in the release formats (scales counted)."""

    parameters: int
    nbytes: int


def scale_name(weight: str) -> str:
    """`X.weight` -> `X.scale`."""
    return weight.removesuffix(".weight") + ".scale"


def inventory(config: ModelConfig, *, drafter: bool) -> dict[str, TensorSpec]:
    """Every weight of the network by its release name; `mtp.*` only with `drafter`.

    Raises ConfigError when a drafter is asked for and the config describes none.
    """
    specs = dict(_backbone(config))
    if drafter:
        config.check_drafter()
        specs |= _drafter(config)
    if config.vision is not None:
        specs |= _vision(config)
    return specs


def stored_inventory(specs: Mapping[str, TensorSpec], spelling: Spelling) -> dict[str, StoredSpec]:
    """Every stored tensor of `specs` in `spelling`, scales included."""
    found: dict[str, StoredSpec] = {}
    for name, spec in specs.items():
        found |= spec.stored(name, spelling)
    return found


def component_sizes(config: ModelConfig) -> dict[str, ComponentSize]:
    """Size of each part of the whole network, and of all of it under `total`."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    specs = inventory(config, drafter=config.num_nextn_predict_layers > 0)
    for name, spec in specs.items():
        nbytes = sum(s.nbytes for s in spec.stored(name, "release").values())
        for key in (spec.component, "total"):
            sums[key][0] += spec.parameters
            sums[key][1] += nbytes
    total = sums.pop("total")
    return {key: ComponentSize(*pair) for key, pair in (*sums.items(), ("total", total))}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _plain(component: str, *shape: int, dtypes: tuple[str, ...] = _BF16) -> TensorSpec:
    return TensorSpec(shape, dtypes, "plain", component)


def _q8(component: str, o: int, i: int) -> TensorSpec:
    return TensorSpec((o, i), _BF16, "q8", component)


def _q4(component: str, o: int, i: int) -> TensorSpec:
    return TensorSpec((o, i), _BF16, "q4", component)


Specs = Iterator[tuple[str, TensorSpec]]


def _backbone(c: ModelConfig) -> Specs:
    yield "embed.weight", _plain("embed", c.vocab_size, c.hidden_size)
    yield "head.weight", _plain("head", c.vocab_size, c.hidden_size)
    yield "norm.weight", _plain("final_norm", c.hidden_size)
    for plan in c.layers:
        prefix = f"layers.{plan.layer}"
        yield from _block(c, prefix, c.n_routed_experts)
        yield from _sources(c, f"{prefix}.attn", plan)
        if plan.engram is not None:
            yield from _engram(c, f"{prefix}.engram", c.engram_num_embeddings[plan.engram])


def _block(c: ModelConfig, prefix: str, experts: int, component: str | None = None) -> Specs:
    """What every layer has, a draft stage included (all of it under `component`, if given)."""
    d, n, heads = c.hidden_size, c.hc_mult, c.num_attention_heads
    attention = component or "attention"
    part = component or "hc_and_norms"
    for sublayer in ("attn", "ffn"):
        yield f"{prefix}.{sublayer}_norm.weight", _plain(part, d)
        yield f"{prefix}.hc_{sublayer}_fn", _plain(part, n * (n + 2), n * d, dtypes=_F32)
        yield f"{prefix}.hc_{sublayer}_base", _plain(part, n * (n + 2), dtypes=_F32)
        yield f"{prefix}.hc_{sublayer}_scale", _plain(part, 3, dtypes=_F32)
    low_rank = c.o_groups * c.o_lora_rank
    for name, o, i in (
        ("wq_a", c.q_lora_rank, d),
        ("wq_b", heads * c.head_dim, c.q_lora_rank),
        ("wkv", c.head_dim, d),
        ("wo_a", low_rank, heads * c.head_dim // c.o_groups),
        ("wo_b", d, low_rank),
    ):
        yield f"{prefix}.attn.{name}.weight", _q8(attention, o, i)
    yield f"{prefix}.attn.q_norm.weight", _plain(attention, c.q_lora_rank)
    yield f"{prefix}.attn.kv_norm.weight", _plain(attention, c.head_dim)
    yield f"{prefix}.attn.attn_sink", _plain(attention, heads, dtypes=_F32)
    router = component or "routers"
    yield f"{prefix}.ffn.gate.weight", _plain(router, experts, d)
    yield f"{prefix}.ffn.gate.bias", _plain(router, experts, dtypes=_F32)
    yield f"{prefix}.ffn.gate.bias_vl", _plain(router, experts, dtypes=_F32)
    f = c.moe_intermediate_size
    for name, o, i in (("w1", f, d), ("w2", d, f), ("w3", f, d)):
        shared = f"{prefix}.ffn.shared_experts.{name}.weight"
        yield shared, _q8(component or "shared_experts", o, i)
        for e in range(experts):
            routed = f"{prefix}.ffn.experts.{e}.{name}.weight"
            yield routed, _q4(component or "routed_experts", o, i)


def _sources(c: ModelConfig, prefix: str, plan: LayerPlan) -> Specs:
    """Compressor and indexer of the layers that own one."""
    d, width = c.hidden_size, c.head_dim
    if plan.owns_kv:
        name = f"{prefix}.compressor"
        yield f"{name}.wkv.weight", _plain("compressors", width, d, dtypes=_EITHER)
        if plan.ratio > 1:
            yield f"{name}.wgate.weight", _plain("compressors", width, d, dtypes=_EITHER)
        yield f"{name}.norm.weight", _plain("compressors", width)
        yield f"{prefix}.indexer.wk.weight", _plain("indexers", c.index_head_dim, width)
        yield f"{prefix}.indexer.k_norm.weight", _plain("indexers", c.index_head_dim)
    if plan.owns_index:
        queries = c.index_n_heads * c.index_head_dim
        yield f"{prefix}.indexer.wq_b.weight", _q8("indexers", queries, c.q_lora_rank)
        yield f"{prefix}.indexer.weights_proj.weight", _plain("indexers", c.index_n_heads, d)


def _engram(c: ModelConfig, prefix: str, rows: int) -> Specs:
    width, n = c.engram_head_dim, c.hc_mult
    table = TensorSpec((rows, width), _BF16, "engram_table", "engram_tables")
    yield f"{prefix}.embed.weight", table
    wkv = _q8("engram_wkv_and_gates", (n + 1) * c.hidden_size, c.engram_columns * width)
    yield f"{prefix}.wkv.weight", wkv
    for name in ("q_weight", "k_weight"):
        gate = _plain("engram_wkv_and_gates", n, c.hidden_size, dtypes=_EITHER)
        yield f"{prefix}.{name}", gate


def _drafter(c: ModelConfig) -> Specs:
    d, part = c.hidden_size, "dspark"
    last = c.num_nextn_predict_layers - 1
    for stage in range(c.num_nextn_predict_layers):
        yield from _block(c, f"mtp.{stage}", c.dspark_n_routed_experts, part)
    yield "mtp.0.main_proj.weight", _q8(part, d, len(c.dspark_target_layer_ids) * d)
    yield "mtp.0.main_norm.weight", _plain(part, d)
    yield f"mtp.{last}.norm.weight", _plain(part, d)
    rank = c.dspark_markov_rank
    yield f"mtp.{last}.markov_head.embed.weight", _plain(part, c.vocab_size, rank)
    yield f"mtp.{last}.markov_head.head.weight", _plain(part, c.vocab_size, rank)
    yield f"mtp.{last}.confidence_head.proj.weight", _plain(part, 1, d + rank)


def _vision(c: ModelConfig) -> Specs:
    v, part = c.vision, "vision"
    assert v is not None
    w, f = v.hidden_size, v.intermediate_size
    pixels = 3 * v.patch_size**2
    yield "vision.patch_embed.proj.weight", _plain(part, w, pixels)
    yield "vision.patch_embed.proj.bias", _plain(part, w)
    for b in range(v.num_hidden_layers):
        block = f"vision.blocks.{b}"
        yield f"{block}.norm1.weight", _plain(part, w)
        yield f"{block}.norm2.weight", _plain(part, w)
        yield f"{block}.attn.wqkv.weight", _plain(part, 3 * w, w)
        yield f"{block}.attn.wqkv.bias", _plain(part, 3 * w)
        yield f"{block}.attn.wo.weight", _plain(part, w, w)
        yield f"{block}.attn.wo.bias", _plain(part, w)
        yield f"{block}.mlp.w1.weight", _plain(part, 2 * f, w)
        yield f"{block}.mlp.w2.weight", _plain(part, w, f)
    yield "vision.norm.weight", _plain(part, w)
    d = c.hidden_size
    for name, i in (("w1", w * v.downsample_ratio**2), ("w2", d)):
        yield f"aligner.{name}.weight", _plain("aligner_and_image_vectors", d, i)
        yield f"aligner.{name}.bias", _plain("aligner_and_image_vectors", d)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, _plain("aligner_and_image_vectors", d)
