"""The network's configuration: every number of a checkpoint's `config.json`, checked.

`ModelConfig` is frozen and hashable, so it can be a static argument of a compiled function. Keys of
the release that cannot change the result are listed in `_INERT`; any other unknown key is refused.
"""

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

_INERT = frozenset(
    "architectures dtype torch_dtype transformers_version quantization_config hidden_act "
    "attention_bias attention_dropout initializer_range use_cache tie_word_embeddings "
    "num_key_value_heads topk_method scoring_func norm_topk_prob rope_parameters rope_scaling "
    "text_config vision_config model_type".split()
)
_REQUIRED_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed layers' rotary table (positions in tokens)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower's widths; the text network never reads them."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


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
    """A DeepSeek-V4.1 network; field names are the release's (`text_config` of `config.json`)."""

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
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None = None
    gate_temp: float = 1.0
    vision: VisionConfig | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, allow_unknown: bool = False) -> "ModelConfig":
        """Parse a `config.json` object; `text_config` keys may also stand on the top level.

        Raises ConfigError for a missing, unknown (unless `allow_unknown`) or contradictory key, and
        for a value of another type.
        """
        _mapping("The model config", raw)
        flat = {k: v for k, v in raw.items() if k != "text_config"}
        flat |= _mapping("text_config", raw.get("text_config", {}))
        flat["model_type"] = raw.get("model_type", flat.get("model_type"))
        _check_family(flat)
        # `vision` is written as vision_config.
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "vision"}
        both = {k: (raw[k], flat[k]) for k in fields if k in raw and raw[k] != flat[k]}
        for key, (outer, inner) in both.items():
            raise ConfigError(
                f"The model config sets {key} to {outer!r} on the top level and to {inner!r} in "
                f"text_config.",
                "Either could be meant, and the network differs.",
                f"Remove one of them, or make {key} equal in both.",
            )
        unknown = sorted(set(flat) - set(fields) - _INERT)
        if unknown and not allow_unknown:
            near = difflib.get_close_matches(unknown[0], fields, 1) or ["a key of the release"]
            raise ConfigError(
                f"The model config has {len(unknown)} unknown keys: {', '.join(unknown)}.",
                "A key that is ignored could change the network without a trace.",
                f"Remove it, correct it (nearest: {near[0]}), or set model.allow_unknown=true.",
            )
        values: dict[str, Any] = {k: flat[k] for k in fields if k in flat}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        scaling = flat.get("rope_scaling")
        scaling = flat.get("rope_parameters") if scaling is None else scaling
        values["rope_scaling"] = _parse_rope_scaling(scaling)
        values.setdefault("candidate_source_layer_id", None)
        if raw.get("vision_config"):
            values["vision"] = _parse_vision(raw["vision_config"])
        required = {
            n
            for n, f in fields.items()
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        missing = sorted(required - set(values))
        if missing:
            raise ConfigError(
                f"The model config lacks {len(missing)} keys: {', '.join(missing)}.",
                "Every number of the network comes from its config; none is assumed.",
                "Add them to config.json, under text_config or on the top level.",
            )
        _check_types(cls, values)
        config = cls(**values)
        config._check()
        return config

    @classmethod
    def from_file(cls, path: str | Path, *, allow_unknown: bool = False) -> "ModelConfig":
        """Read `config.json` at `path` (a file, or a folder that holds one)."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"There is no model config at {path}.",
                "A model folder holds config.json beside its weights.",
                "Check the path, or set DEEPINFER_HF_MODEL_DIR to a complete model folder.",
            ) from None
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path} is not valid JSON (line {error.lineno}: {error.msg}).",
                "The network cannot be built without its config.",
                "Download the file again or correct it.",
            ) from None
        return cls.from_dict(raw, allow_unknown=allow_unknown)

    def _check(self) -> None:
        ids, n = self.kv_source_layer_ids, self.num_hidden_layers
        problems = []
        stages = self.num_nextn_predict_layers
        named = {
            "kv_source_layer_ids": ids,
            "index_source_layer_ids": self.index_source_layer_ids,
            "engram_layer_ids": self.engram_layer_ids,
            "dspark_target_layer_ids": self.dspark_target_layer_ids,
        }
        for name, listed in named.items():
            if list(listed) != sorted({i for i in listed if 0 <= i < n}):
                problems.append(f"{name} {list(listed)} are not ascending layers below {n}")
        candidate = self.candidate_source_layer_id
        if candidate is not None and candidate not in self.index_source_layer_ids:
            problems.append(f"the candidate source {candidate} is no index source")
        if len(self.compress_ratios) not in (n, n + stages):
            problems.append(
                f"compress_ratios has {len(self.compress_ratios)} entries for {n} + {stages} layers"
            )
        elif any(r not in (0, 1, 2) for r in self.compress_ratios):
            problems.append("compress_ratios holds a ratio other than 0, 1, 2")
        else:
            for plan in map(self._plan_of, range(n)):
                if plan.ratio and plan.kv_source is None:
                    problems.append(f"layer {plan.layer} is compressed but has no kv source")
                elif plan.ratio and plan.index_source is None:
                    problems.append(f"layer {plan.layer} is compressed but has no index source")
                elif plan.ratio and plan.ratio != self.compress_ratios[plan.kv_source or 0]:
                    problems.append(f"layer {plan.layer} and its kv source differ in ratio")
        if not set(ids) <= set(self.index_source_layer_ids):
            problems.append("every kv source must be an index source")
        if len(self.engram_layer_ids) != len(self.engram_num_embeddings):
            problems.append("engram_layer_ids and engram_num_embeddings differ in length")
        if self.num_attention_heads % self.o_groups:
            problems.append(
                f"{self.num_attention_heads} heads do not divide into {self.o_groups} output groups"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            problems.append(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds {self.n_routed_experts}"
            )
        if self.n_shared_experts != 1:
            problems.append(f"n_shared_experts is {self.n_shared_experts}, the family has 1")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            problems.append(f"qk_rope_head_dim {self.qk_rope_head_dim} does not fit the heads")
        if problems:
            raise ConfigError(
                f"The model config contradicts itself: {'; '.join(problems)}.",
                "Layers, sources and widths must agree before anything is built.",
                "Correct config.json.",
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

    @property
    def engram_columns(self) -> int:
        """Table rows gathered per token and Engram layer: heads x n-gram orders 2..max."""
        return self.engram_n_heads * (self.engram_max_ngram_size - 1)

    def digest_dict(self) -> dict[str, Any]:
        """Plain JSON values, for the manifest and the config digest."""
        return dataclasses.asdict(self)


def _check_family(flat: Mapping[str, Any]) -> None:
    if flat.get("model_type") not in ("deepseek_v41", "deepseek_v41_text"):
        raise ConfigError(
            f"The model type is {flat.get('model_type')!r}, not 'deepseek_v41'.",
            "This engine runs one family, DeepSeek-V4.1, exactly.",
            "Point it at a DeepSeek-V4.1 checkpoint.",
        )
    for key, wanted in _REQUIRED_VALUES.items():
        if key in flat and flat[key] != wanted:
            raise ConfigError(
                f"The model config sets {key} to {flat[key]!r}; only {wanted!r} is implemented.",
                "The network would be another one than this engine computes.",
                "Use a checkpoint of the DeepSeek-V4.1 family.",
            )


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}.",
            "It holds the numbers of the network by name.",
            "Give an object with keys and values.",
        )
    return value


def _is(value: Any, wanted: Any) -> bool:
    """Whether `value` has the annotated type; an integer also serves as a float, a bool never."""
    if isinstance(value, bool):
        return wanted is bool
    parts = typing.get_args(wanted)
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, tuple) and all(_is(item, parts[0]) for item in value)
    if parts:
        return any(_is(value, part) for part in parts)
    return isinstance(value, int | float if wanted is float else wanted)


def _spelled(wanted: Any) -> str:
    parts = typing.get_args(wanted)
    if typing.get_origin(wanted) is tuple:
        return "a list of integers"
    if parts:
        return " or ".join(_spelled(part) for part in parts)
    return {int: "an integer", float: "a number"}.get(wanted, "null")


def _check_types(cls: type, values: Mapping[str, Any], table: str = "") -> None:
    """Refuse a value of another type than the field's; a text would fail far from here."""
    for name, wanted in typing.get_type_hints(cls).items():
        if name in values and not _is(values[name], wanted):
            value = values[name]
            raise ConfigError(
                f"The model config sets {table}{name} to {value!r}, of type "
                f"{type(value).__name__}.",
                f"It must be {_spelled(wanted)}; nothing is converted.",
                f"Correct {table}{name} in config.json.",
            )


def _parse_vision(raw: Any) -> VisionConfig:
    fields = dataclasses.fields(VisionConfig)
    given = _mapping("vision_config", raw)
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in given]
    if missing:
        raise ConfigError(
            f"vision_config lacks {len(missing)} keys: {', '.join(missing)}.",
            "Every number of the network comes from its config; none is assumed.",
            "Add them to vision_config, or remove it as a whole.",
        )
    values = {f.name: given[f.name] for f in fields if f.name in given}
    _check_types(VisionConfig, values, "vision_config.")
    return VisionConfig(**values)


def _parse_rope_scaling(raw: Any) -> RopeScaling | None:
    if raw is None:
        return None
    _mapping("rope_scaling", raw)
    kind = raw.get("rope_type", raw.get("type", "yarn"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(
            f"rope_scaling has type {kind!r}; only 'yarn' is implemented.",
            "The rotary table decides every attention score.",
            "Use a DeepSeek-V4.1 config, or remove rope_scaling for an unscaled table.",
        )
    names = [f.name for f in dataclasses.fields(RopeScaling)]
    missing = [n for n in names if n not in raw]
    if missing:
        raise ConfigError(
            f"rope_scaling lacks {', '.join(missing)}.",
            "The YaRN table needs all four numbers.",
            "Add them to config.json.",
        )
    values = {n: raw[n] for n in names}
    _check_types(RopeScaling, values, "rope_scaling.")
    return RopeScaling(**values)
