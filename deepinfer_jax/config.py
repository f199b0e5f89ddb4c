"""The network's configuration: every number of a checkpoint's `config.json`, checked.

`ModelConfig` is frozen and hashable, so it can be a static argument of a compiled function. How its
numbers are read from JSON is in `config_json`; what they must be to each other is here.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer_jax import config_json
from deepinfer_jax.config_json import RopeScaling, VisionConfig
from deepinfer_jax.errors import ConfigError

_MAY_BE_ZERO = frozenset({"rms_norm_eps", "hc_eps", "num_nextn_predict_layers"})
_TOKEN_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "engram_pad_token_id",
    "dspark_noise_token_id",
)
_LAYER_LISTS = (
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "engram_layer_ids",
    "dspark_target_layer_ids",
)
# Numbers that are no sizes; `_contradictions` checks them.
_NO_SIZES = frozenset(
    {*_TOKEN_IDS, *_LAYER_LISTS, "compress_ratios", "candidate_source_layer_id", "n_shared_experts"}
)


@dataclass(frozen=True)
class LayerPlan:
    """What one backbone layer reads, owns and writes.

    Attributes:
        layer: index from 0.
        ratio: compression ratio, 0 for a window-only layer.
        kv_source: layer whose compressor feeds this one's main KV, or None.
        index_source: layer whose selection this one uses, or None.
        owns_kv: this layer holds a compressor and index keys.
        owns_index: this layer holds an indexer.
        writes_candidates: its scores choose the candidate blocks.
        uses_candidates: its indexer selects inside the candidate blocks only.
        engram: position in `engram_layer_ids`, or None.
        tap: the mean of this layer's input streams feeds the drafter.
    """

    layer: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    writes_candidates: bool
    uses_candidates: bool
    engram: int | None
    tap: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """Neighbours of equal kind have equal parameters and equal code, so they can be scanned.

        A layer that owns a compressor, an indexer or an Engram table is alone in its kind.
        """
        alone = self.owns_kv or self.owns_index or self.engram is not None
        return (self.ratio, self.kv_source, self.index_source, self.layer if alone else None)


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4.1 network; field names are the release's (`text_config` of `config.json`).

    Experts of a draft stage that the file leaves out or sets to 0 are as many as a layer's.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    image_token_id: int | None = None
    gate_temp: float = 1.0
    vision: VisionConfig | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, allow_unknown: bool = False) -> "ModelConfig":
        """Parse a `config.json` object; `text_config` keys may also stand on the top level.

        Raises ConfigError for a missing, unknown (unless `allow_unknown`) or contradictory key, and
        for a value of another type or of another network.
        """
        config = config_json.parse(cls, raw, allow_unknown=allow_unknown)
        if config.num_nextn_predict_layers:
            config = dataclasses.replace(
                config,
                dspark_n_routed_experts=config.dspark_n_routed_experts or config.n_routed_experts,
                dspark_num_experts_per_tok=config.dspark_num_experts_per_tok
                or config.num_experts_per_tok,
            )
        config._check()
        return config

    @classmethod
    def from_file(cls, path: str | Path, *, allow_unknown: bool = False) -> "ModelConfig":
        """Read `config.json` at `path` (a file, or a folder that holds one).

        Raises ConfigError as `from_dict`, and for a file that is missing or no JSON.
        """
        return cls.from_dict(config_json.read(path), allow_unknown=allow_unknown)

    def _check(self) -> None:
        empty = [
            f"{name} {number}"
            for name, number in self._sizes()
            if not 0 <= number < math.inf or (number == 0 and not self._may_be_zero(name))
        ]
        if empty:
            raise ConfigError(
                f"The model config has {len(empty)} sizes that are not positive numbers: "
                f"{', '.join(empty)}.",
                "Nothing can be built from a width, a count or a factor of zero or less.",
                "Correct config.json.",
            )
        problems = list(self._contradictions())
        if problems:
            raise ConfigError(
                f"The model config contradicts itself: {'; '.join(problems)}.",
                "Layers, sources and widths must agree before anything is built.",
                "Correct config.json.",
            )

    def _sizes(self) -> Iterator[tuple[str, float]]:
        tables = {"": self, "rope_scaling.": self.rope_scaling, "vision_config.": self.vision}
        for prefix, table in tables.items():
            for field in dataclasses.fields(table) if table is not None else ():
                value = getattr(table, field.name)
                if field.name not in _NO_SIZES:
                    numbers = value if isinstance(value, tuple) else (value,)
                    yield from (
                        (prefix + field.name, n) for n in numbers if isinstance(n, int | float)
                    )

    def _may_be_zero(self, name: str) -> bool:
        absent_drafter = not self.num_nextn_predict_layers and name.startswith("dspark_")
        return absent_drafter or name in _MAY_BE_ZERO

    def _contradictions(self) -> Iterator[str]:
        """What does not fit together, in a few words each; needs sizes that are positive."""
        n, stages = self.num_hidden_layers, self.num_nextn_predict_layers
        for name in _TOKEN_IDS:
            token = getattr(self, name)
            unused = not stages and name.startswith("dspark_")
            if token is not None and not unused and not 0 <= token < self.vocab_size:
                yield f"{name} {token} is no id below vocab_size {self.vocab_size}"
        for name in _LAYER_LISTS:
            listed = list(getattr(self, name))
            if listed != sorted({i for i in listed if 0 <= i < n}):
                yield f"{name} {listed} are not ascending layers below {n}"
        if len(self.compress_ratios) not in (n, n + stages):
            yield (
                f"compress_ratios has {len(self.compress_ratios)} entries for {n} + {stages} layers"
            )
        elif any(r not in (0, 1, 2) for r in self.compress_ratios):
            yield "compress_ratios holds a ratio other than 0, 1, 2"
        else:
            yield from self._source_contradictions()
        if not set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids):
            yield "every kv source must be an index source"
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            yield "engram_layer_ids and engram_num_embeddings differ in length"
        if self.engram_max_ngram_size < 2:
            yield f"engram_max_ngram_size is {self.engram_max_ngram_size}, an n-gram has at least 2"
        if self.num_attention_heads % self.o_groups:
            heads = self.num_attention_heads
            yield f"{heads} heads do not divide into {self.o_groups} output groups"
        for prefix in ("", "dspark_") if stages else ("",):
            chosen = getattr(self, f"{prefix}num_experts_per_tok")
            experts = getattr(self, f"{prefix}n_routed_experts")
            if chosen > experts:
                yield f"{prefix}num_experts_per_tok {chosen} exceeds {experts}"
        if self.n_shared_experts != 1:
            yield f"n_shared_experts is {self.n_shared_experts}, the family has 1"
        rope = self.qk_rope_head_dim
        if rope % 2 or rope > min(self.head_dim, self.index_head_dim):
            yield f"qk_rope_head_dim {rope} does not fit the heads"
        for name in ("rope_theta", "compress_rope_theta"):
            if getattr(self, name) <= 1:
                yield f"{name} {getattr(self, name)} is not above 1"

    def _source_contradictions(self) -> Iterator[str]:
        """Those of layers and their sources; needs one legal ratio per layer."""
        candidate, n = self.candidate_source_layer_id, self.num_hidden_layers
        if any(self.compress_ratios[n:]):
            yield "compress_ratios compresses a layer of the drafter, which has no kv source"
        for source in self.index_source_layer_ids:
            if 0 <= source < n and not self.compress_ratios[source]:
                yield f"index source {source} is not compressed, so it has nothing to select"
        if candidate is not None and candidate not in self.index_source_layer_ids:
            yield f"the candidate source {candidate} is no index source"
        plans = [self._plan_of(layer) for layer in range(n)]
        scored = next((plan.kv_source for plan in plans if plan.writes_candidates), None)
        for plan in plans:
            if not plan.ratio:
                continue
            if plan.kv_source is None:
                yield f"layer {plan.layer} is compressed but has no kv source"
            elif plan.index_source is None:
                yield f"layer {plan.layer} is compressed but has no index source"
            elif plan.ratio != self.compress_ratios[plan.kv_source]:
                yield f"layer {plan.layer} and its kv source differ in ratio"
            elif scored is not None and plan.uses_candidates and plan.kv_source != scored:
                yield (
                    f"layer {plan.layer} selects from kv source {plan.kv_source} inside candidate "
                    f"blocks of kv source {scored}"
                )

    def _plan_of(self, layer: int) -> LayerPlan:
        ratio = self.compress_ratios[layer]
        kv = max((s for s in self.kv_source_layer_ids if s <= layer), default=None)
        index = max((s for s in self.index_source_layer_ids if s <= layer), default=None)
        candidate = self.candidate_source_layer_id
        owns_index = bool(ratio) and index == layer
        return LayerPlan(
            layer=layer,
            ratio=ratio,
            kv_source=kv if ratio else None,
            index_source=index if ratio else None,
            owns_kv=bool(ratio) and kv == layer,
            owns_index=owns_index,
            writes_candidates=owns_index and candidate == layer,
            uses_candidates=owns_index and candidate is not None and layer > candidate,
            engram=self.engram_layer_ids.index(layer) if layer in self.engram_layer_ids else None,
            tap=layer in self.dspark_target_layer_ids and self.num_nextn_predict_layers > 0,
        )

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """One plan per backbone layer."""
        return tuple(self._plan_of(layer) for layer in range(self.num_hidden_layers))

    @cached_property
    def runs(self) -> tuple[tuple[LayerPlan, ...], ...]:
        """Maximal runs of neighbouring layers of equal kind, in order; each is one scan."""
        runs: list[list[LayerPlan]] = []
        for plan in self.layers:
            if runs and runs[-1][0].kind == plan.kind:
                runs[-1].append(plan)
            else:
                runs.append([plan])
        return tuple(tuple(run) for run in runs)

    @cached_property
    def stages(self) -> tuple[LayerPlan, ...]:
        """One plan per draft stage, numbered from 0: layers that see a window and nothing else."""
        return tuple(
            LayerPlan(
                layer=stage,
                ratio=0,
                kv_source=None,
                index_source=None,
                owns_kv=False,
                owns_index=False,
                writes_candidates=False,
                uses_candidates=False,
                engram=None,
                tap=False,
            )
            for stage in range(self.num_nextn_predict_layers)
        )

    def check_drafter(self) -> None:
        """Raise ConfigError unless the config describes a drafter."""
        if not self.stages:
            raise ConfigError(
                "A drafter was asked for, and num_nextn_predict_layers is 0.",
                "The config describes a network without draft stages.",
                "Set the draft length to 0, or use a checkpoint with a drafter.",
            )

    @cached_property
    def of_stages(self) -> "ModelConfig":
        """The numbers of a draft stage: these, with its own experts in place of a layer's."""
        return dataclasses.replace(
            self,
            n_routed_experts=self.dspark_n_routed_experts,
            num_experts_per_tok=self.dspark_num_experts_per_tok,
        )

    @property
    def engram_columns(self) -> int:
        """Table rows gathered per token and Engram layer: heads x n-gram orders 2..max."""
        return self.engram_n_heads * (self.engram_max_ngram_size - 1)

    def digest_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the manifest and the config digest."""
        return dataclasses.asdict(self)
