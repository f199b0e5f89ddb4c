"""A checkpoint's `config.json` read into a frozen dataclass: every key known, every value typed.

A key is a field, another spelling of one (`_NATIVE`), a key whose one implemented value is in
`_REQUIRED`, or one in `_INERT`, which cannot change a result. Any other key is refused, in nested
tables too.
"""

import dataclasses
import difflib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

_TYPES = ("deepseek_v41", "deepseek_v41_text")
_INERT = frozenset("attention_dropout initializer_range transformers_version use_cache".split())
_ROPE = ("rope_scaling", "rope_parameters")
# The vendor's native spelling -> the field (draft specification, "Config keys").
_NATIVE = {"dspark_n_activated_experts": "dspark_num_experts_per_tok"}
# Table ("" is the top level) -> key -> the one value this engine implements; a key may be left out.
_REQUIRED: dict[str, dict[str, Any]] = {
    "": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "vision_config": {"model_type": "deepseek_v41_vision"},
    # The family scales neither cos and sin nor the softmax, and rounds the ramp's ends.
    **{
        name: {"attention_factor": 1, "mscale": 0, "mscale_all_dim": 0, "truncate": True}
        for name in _ROPE
    },
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


def read(path: str | Path) -> Any:
    """The content of `config.json` at `path` (a file, or a folder that holds one).

    Raises ConfigError when there is no such file, it cannot be read, or it is not JSON.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no model config at {path}.",
            "A model folder holds config.json beside its weights.",
            "Check the path, or set DEEPINFER_HF_MODEL_DIR to a complete model folder.",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}).",
            "The network cannot be built without its config.",
            "Make it a readable file, or name another model folder.",
        ) from None
    except ValueError as error:
        # JSON, UTF-8 and the length of a number are three kinds of it.
        told = isinstance(error, json.JSONDecodeError)
        detail = f"line {error.lineno}: {error.msg}" if told else str(error)
        raise ConfigError(
            f"{path} is not valid JSON ({detail}).",
            "The network cannot be built without its config.",
            "Download the file again or correct it.",
        ) from None


def parse[Parsed](cls: type[Parsed], raw: Any, *, allow_unknown: bool) -> Parsed:
    """Build the frozen dataclass `cls` from a `config.json` object.

    Args:
        cls: its fields are the release's keys, but `vision`, which is written as vision_config.
        raw: the object; keys of `text_config` may also stand on the top level.
        allow_unknown: leave out keys that are not known instead of refusing them.

    Raises:
        ConfigError: a missing, unknown or contradictory key, or a value that is of another type
            or that would be another network.
    """
    flat = _flat(raw)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.name != "vision"}
    tables: dict[str, Mapping[str, Any]] = {"": flat}
    for name in ("quantization_config", "vision_config", *_ROPE):
        if flat.get(name) is not None:
            tables[name] = _mapping(name, flat[name])
    _check_required(tables)
    if not allow_unknown:
        _check_known(tables, set(fields))
    values: dict[str, Any] = {k: flat[k] for k in fields if k in flat}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    values["rope_scaling"] = _rope_scaling(tables)
    values.setdefault("candidate_source_layer_id", None)
    if "vision_config" in tables:
        values["vision"] = _vision(tables["vision_config"])
    missing = sorted(n for n, f in fields.items() if _required(f) and n not in values)
    if missing:
        raise ConfigError(
            f"The model config lacks {len(missing)} keys: {', '.join(missing)}.",
            "Every number of the network comes from its config; none is assumed.",
            "Add them to config.json, under text_config or on the top level.",
        )
    _check_types(cls, values)
    return cls(**values)


def _flat(raw: Any) -> dict[str, Any]:
    """The keys of the top level and of text_config in one table, without the model types.

    A native spelling becomes the field's name.
    """
    outer = {k: v for k, v in _mapping("The model config", raw).items() if k != "text_config"}
    inner = dict(_mapping("text_config", raw.get("text_config", {})))
    types = [t.pop("model_type") for t in (outer, inner) if "model_type" in t] or [None]
    for wrong in (t for t in types if t not in _TYPES):
        raise ConfigError(
            f"The model type is {wrong!r}, not 'deepseek_v41'.",
            "This engine runs one family, DeepSeek-V4.1, exactly.",
            "Point it at a DeepSeek-V4.1 checkpoint.",
        )
    for key in (k for k in outer if k in inner and outer[k] != inner[k]):
        raise ConfigError(
            f"The model config sets {key} to {outer[key]!r} on the top level and to "
            f"{inner[key]!r} in text_config.",
            "Either could be meant, and the network differs.",
            f"Remove one of them, or make {key} equal in both.",
        )
    flat = outer | inner
    for native, name in _NATIVE.items():
        if native not in flat:
            continue
        value = flat.pop(native)
        if flat.setdefault(name, value) != value:
            raise ConfigError(
                f"The model config sets {native} to {value!r} and {name} to {flat[name]!r}.",
                "They are two spellings of one number, and the network differs.",
                "Remove one of them, or make both equal.",
            )
    return flat


def _check_required(tables: Mapping[str, Mapping[str, Any]]) -> None:
    for name, table in tables.items():
        for key, wanted in _REQUIRED[name].items():
            if key in table and table[key] != wanted:
                raise ConfigError(
                    f"The model config sets {_dotted(name, key)} to {table[key]!r}; only "
                    f"{wanted!r} is implemented.",
                    "The network would be another one than this engine computes.",
                    "Use a checkpoint of the DeepSeek-V4.1 family.",
                )


def _check_known(tables: Mapping[str, Mapping[str, Any]], fields: set[str]) -> None:
    rope = {f.name for f in dataclasses.fields(RopeScaling)} | {"rope_type", "type", "rope_theta"}
    own = {
        "": fields | _INERT | set(_REQUIRED),
        "vision_config": {f.name for f in dataclasses.fields(VisionConfig)},
        **dict.fromkeys(_ROPE, rope),
    }
    known = {name: own.get(name, set()) | set(_REQUIRED[name]) for name in tables}
    unknown = sorted(
        _dotted(n, key) for n, table in tables.items() for key in set(table) - known[n]
    )
    if unknown:
        legal = [_dotted(name, key) for name, keys in known.items() for key in keys if key]
        near = difflib.get_close_matches(unknown[0], legal, 1) or ["a key of the release"]
        raise ConfigError(
            f"The model config has {len(unknown)} unknown keys: {', '.join(unknown)}.",
            "A key that is ignored could change the network without a trace.",
            f"Remove it, correct it (nearest: {near[0]}), or set model.allow_unknown=true.",
        )


def _dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


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
            key, value = _dotted(table, name), values[name]
            raise ConfigError(
                f"The model config sets {key} to {value!r}, of type {type(value).__name__}.",
                f"It must be {_spelled(wanted)}; nothing is converted.",
                f"Correct {key} in config.json.",
            )


def _vision(given: Mapping[str, Any]) -> VisionConfig:
    fields = dataclasses.fields(VisionConfig)
    missing = [f.name for f in fields if _required(f) and f.name not in given]
    if missing:
        raise ConfigError(
            f"vision_config lacks {len(missing)} keys: {', '.join(missing)}.",
            "Every number of the network comes from its config; none is assumed.",
            "Add them to vision_config, or remove it as a whole.",
        )
    values = {f.name: given[f.name] for f in fields if f.name in given}
    _check_types(VisionConfig, values, "vision_config")
    return VisionConfig(**values)


def _rope_scaling(tables: Mapping[str, Mapping[str, Any]]) -> RopeScaling | None:
    """The YaRN numbers of rope_scaling or rope_parameters; None for an unscaled table."""
    parsed = [_yarn(name, tables[name], tables[""]) for name in _ROPE if name in tables]
    if len(set(parsed)) > 1:
        raise ConfigError(
            "The model config has both rope_scaling and rope_parameters, and they differ.",
            "Either could be meant, and the rotary table decides every attention score.",
            "Remove one of them.",
        )
    return parsed[0] if parsed else None


def _yarn(name: str, raw: Mapping[str, Any], flat: Mapping[str, Any]) -> RopeScaling | None:
    names = [f.name for f in dataclasses.fields(RopeScaling)]
    kind = raw.get("rope_type", raw.get("type", "yarn"))
    repeated = {"type": kind, "rope_theta": flat.get("rope_theta")}
    for key in (k for k in repeated if k in raw and raw[k] != repeated[k]):
        raise ConfigError(
            f"{name}.{key} is {raw[key]!r}, and elsewhere the same is {repeated[key]!r}.",
            "Either could be meant, and the rotary table decides every attention score.",
            f"Remove {name}.{key} or correct it.",
        )
    if kind not in ("yarn", "default"):
        raise ConfigError(
            f"{name} has type {kind!r}; only 'yarn' is implemented.",
            "The rotary table decides every attention score.",
            f"Use a DeepSeek-V4.1 config, or remove {name} for an unscaled table.",
        )
    wrong = [n for n in names if (n in raw) == (kind == "default")]
    if wrong:
        verb = "has" if kind == "default" else "lacks"
        raise ConfigError(
            f"{name} of type {kind!r} {verb} {', '.join(wrong)}.",
            "A YaRN table needs all four numbers, and an unscaled one has none.",
            "Correct config.json.",
        )
    if kind == "default":
        return None
    values = {n: raw[n] for n in names}
    _check_types(RopeScaling, values, name)
    return RopeScaling(**values)
