"""What one engine was asked for: TOML files, overrides and the environment, resolved with sources.

Precedence: explicit argument > `--set` > environment > config file > default.
"""

import copy
import dataclasses
import hashlib
import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_jax import keywords as original
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.env import Env
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.settings_file import config_names as config_names
from deepinfer_jax.settings_file import (
    illegal_value,
    is_bare,
    package_folder,
    parse_overrides,
    read,
    unknown_key,
)

AUTO = "auto"
_KERNELS = "kernels."
_CHOICES: dict[str, tuple[str, ...]] = {
    "arithmetic": ("f32", "f32qdq", "release"),
    "cache_format": ("f32", "bf16", "release"),
    "weights": ("dequantized", "packed"),
    "engram": ("device", "host", "mmap"),
    "sampler": ("stable", "original"),
    "verification": ("coupled", "rejection", "block"),
    "logprobs_mode": ("raw", "processed"),
    "prefix_reuse": ("exact", "cache_exact", "bounded", "off"),
    "prefill_truncation": ("off", "mask", "compact"),
    "compile": ("none", "lazy", "all"),
    "late_compile": ("warn", "error"),
    "truncate": ("error", "left", "right"),
}
_SWITCHES = frozenset({"batch_invariant", "overlap", "prefill_first_exact", "varlen"})
_COUNTS = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens", "pages"})
_AMOUNTS = frozenset(
    {"swap_pages", "prefill_keep_tokens", "nextn", "max_backtracking_tokens", "cost_cache_ttl"}
)
# These fields take "auto" in a file or in --set, which leaves the choice to the engine.
_OPTIONAL = frozenset(
    {
        *("arithmetic", "cache_format", "max_model_len", "pages", "nextn"),
        *("compile_cache_dir", "cost_cache_dir"),
    }
)
# Where a model lies, and when programs are compiled and where they are kept, cannot change a result
# and differ between machines; the network is in the digest, and the weights have their own.
_OUTSIDE_DIGEST = frozenset(
    {
        *("model", "compile", "late_compile", "compile_cache_dir"),
        *("cost_cache_dir", "cost_cache_ttl"),
    }
)


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs a network; hashable.

    Attributes:
        model: a packaged model's name or a model folder; the config's name when that config
            describes a network itself.
        arithmetic: "f32", "f32qdq" (F32 with the release's rounding points) or "release"; None
            means f32 on CPU and release elsewhere.
        cache_format: caches in "f32" or "bf16" numbers, or in the "release"'s records; None means
            release with the arithmetic release and f32 with the others. One that does not hold
            what the arithmetic defines, to the last bit, is refused when the model is opened.
        weights: "dequantized" on load, or kept "packed" in the stored formats.
        engram: where the Engram tables lie: "device" memory, "host" memory or a file ("mmap").
        max_model_len: longest prompt plus output in tokens; None means the model's limit or what
            memory holds, whichever is smaller.
        max_num_seqs: sequences that run at the same time.
        max_num_batched_tokens: rows of one step, of prompts and of running sequences together.
        pages: pages of 128 positions that the cache holds; None gives every sequence the pages of
            the longest one. With fewer, sequences wait for pages, or give them up and run again.
        swap_pages: pages of preempted sequences that are kept in host memory; a sequence that does
            not fit there is run again.
        prefix_reuse: what a prompt takes over from earlier ones with the same beginning: "exact"
            computes enough of it again for a cold run's results, "cache_exact" for a cold run's
            pages, "bounded" one window only; "off" takes nothing over.
        prefill_truncation: "off", or bounded replay of the decoder's layers: only the last prompt
            tokens run through them. "compact" leaves the other rows out, "mask" hides them.
        prefill_keep_tokens: how many prompt tokens these are.
        prefill_first_exact: the decoder's first layer keeps the window keys of all prompt tokens.
        overlap: a step is launched before the results of the one before it are read.
        nextn: tokens that are drafted for each sequence in a step; None means the drafter's block,
            or 0 for a checkpoint without a drafter.
        max_backtracking_tokens: positions that rings keep beyond their window, so that drafts can
            be undone; where it is less than one more than is drafted, they keep that many.
        verification: which drafts are kept: those that equal the target's own draw ("coupled": the
            tokens are those of decoding without drafts), or by token-wise "rejection" or "block"
            verification, which keep more and the distribution. The original sampler has a rule of
            its own.
        varlen: how many drafts of a sequence are verified, and whether any are proposed, follows
            their confidence and what a longer step costs; else all are.
        confidence_temperature: what the confidences of drafts are divided by before the sigmoid:
            one number, or one for each draft, with commas between them.
        cost_cache_dir: folder that keeps what steps of each size take, which varlen measures before
            the first request; None measures at every start.
        cost_cache_ttl: for how many seconds such times are used.
        sampler: "stable" draws or the "original" engine's.
        logprobs_mode: "raw" (temperature 1, unfiltered) or "processed".
        truncate: what becomes of a prompt that leaves no room for its max_tokens: an "error", or
            tokens are cut at its "left" (after its BOS) or "right" end until it does.
        batch_invariant: the bits of a row never depend on the other rows of its batch.
        kernels: (op, kernel name) pairs sorted by op; such a kernel is used or refused.
        compile: programs that are compiled ahead: "none", what a request is known to need ("lazy"),
            or "all", before the first request runs.
        late_compile: what a program that is missing after "all" is: compiled and said loudly
            ("warn"), or an "error".
        compile_cache_dir: folder that keeps compiled programs, or None.
    """

    model: str = "nano"
    arithmetic: str | None = None
    cache_format: str | None = None
    weights: str = "dequantized"
    engram: str = "device"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    pages: int | None = None
    swap_pages: int = 0
    prefix_reuse: str = "exact"
    prefill_truncation: str = "off"
    prefill_keep_tokens: int = 0
    prefill_first_exact: bool = False
    overlap: bool = True
    nextn: int | None = None
    max_backtracking_tokens: int = 6
    verification: str = "coupled"
    varlen: bool = False
    confidence_temperature: str = "1.0"
    cost_cache_dir: str | None = None
    cost_cache_ttl: int = 3600
    sampler: str = "stable"
    logprobs_mode: str = "raw"
    truncate: str = "error"
    batch_invariant: bool = False
    kernels: tuple[tuple[str, str], ...] = ()
    compile: str = "lazy"
    late_compile: str = "warn"
    compile_cache_dir: str | None = None

    def arithmetic_on(self, device_kind: str) -> str:
        """The arithmetic used on a device kind: as asked, else f32 on "cpu", release elsewhere."""
        return self.arithmetic or ("f32" if device_kind == "cpu" else "release")

    @property
    def rule(self) -> str:
        """The rule that drafts are verified by: `verification`, or "original" with that sampler."""
        return "original" if self.sampler == "original" else self.verification

    def backtracking(self, drafts: int) -> int:
        """Positions that rings keep beyond their window where a step verifies so many drafts.

        max(max_backtracking_tokens, drafts + 1), as the original engine has it.
        """
        return max(self.max_backtracking_tokens, drafts + 1)


@dataclass(frozen=True)
class Settings:
    """A resolved engine: its config, its network or model folder, and who set what.

    Attributes:
        engine: the engine's fields.
        network: the network that the config file itself describes; None means a stored model.
        allow_unknown: whether unknown keys of the folder's config.json are ignored.
        sources: (key, value, source) of every engine field and every overridden model key.
    """

    engine: EngineConfig
    network: ModelConfig | None
    allow_unknown: bool
    sources: tuple[tuple[str, Any, str], ...]

    @property
    def folder(self) -> Path | None:
        """The stored model's folder, None without one; CheckpointError when it does not exist."""
        return None if self.network is not None else model_folder(self.engine.model)

    def model_config(self) -> ModelConfig:
        """The network's config, read from the model folder if the file did not describe it."""
        if self.network is not None:
            return self.network
        folder = model_folder(self.engine.model)
        return ModelConfig.from_file(folder, allow_unknown=self.allow_unknown)

    def canonical_json(self) -> str:
        """The resolved config without spaces and with sorted keys; equal configs, equal text.

        Paths are left out: the network that a model's folder describes stands for the folder.
        """
        engine = {
            k: v for k, v in dataclasses.asdict(self.engine).items() if k not in _OUTSIDE_DIGEST
        }
        content = {"engine": engine, "model": self.model_config().digest_dict()}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self) -> str:
        """SHA-256 of `canonical_json`, in hexadecimal."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


def model_folder(model: str) -> Path:
    """The folder of a packaged model's name, or `model` itself as a path.

    A packaged name is the name alone: `./nano` and `nano/` are paths. Raises CheckpointError when
    there is no such folder with a config.json.
    """
    packaged = [package_folder("models") / model] if is_bare(model) else []
    for folder in (*packaged, Path(os.path.expanduser(model))):
        if (folder / "config.json").is_file():
            return folder
    names = sorted(path.parent.name for path in package_folder("models").glob("*/config.json"))
    raise CheckpointError(
        f"There is no model {model!r}: neither a packaged model nor a folder with a config.json.",
        f"The packaged models are: {', '.join(names) or 'none'}.",
        "Name one of them, or set DEEPINFER_HF_MODEL_DIR or engine.model to a model folder.",
    )


def engine_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The `EngineConfig` fields that keywords of `LLM` set, the original engine's names included.

    Raises ConfigError for an unknown name (with the nearest legal one), and for one of the
    original's whose value cannot be honoured.
    """
    return original.translate(keywords, [f.name for f in dataclasses.fields(EngineConfig)])


def load(
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    env: Env | None = None,
    explicit: Mapping[str, Any] | None = None,
) -> Settings:
    """Resolve an engine.

    Args:
        config: the name of a packaged config, a TOML file, or None for the defaults alone.
        overrides: texts "engine.max_num_seqs=8" or "model.allow_unknown=true"; a value is read
            as TOML, and as plain text where it is no TOML.
        env: the parsed environment; None leaves it out.
        explicit: engine fields that the caller passed as arguments, without those left out.

    Raises:
        ConfigError: an unknown key (with the nearest legal one) or an illegal value.
    """
    name, content = read(config) if config is not None else ("", {})
    in_file = dict(content.get("engine", {}))
    network = copy.deepcopy(content.get("model", {}))
    on_line = parse_overrides(overrides)
    describes = bool(set(network) - {"allow_unknown"})
    if describes:
        in_file["model"] = name
    layers = {
        "default": {f.name: f.default for f in dataclasses.fields(EngineConfig)},
        "file": in_file,
        "environment": _from_env(env) if env is not None else {},
        "--set": on_line.get("engine", {}),
        "explicit": dict(explicit or {}),
    }
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers.items():
        for key, value in _flat_kernels(layer, source).items():
            values[key] = _checked(key, value, source)
            sources[key] = source
    record = [(f"engine.{key}", values[key], source) for key, source in sources.items()]
    kernels = {k.removeprefix(_KERNELS): v for k, v in values.items() if k.startswith(_KERNELS)}
    fields = {k: v for k, v in values.items() if not k.startswith(_KERNELS)}
    engine = EngineConfig(**fields, kernels=tuple(sorted(kernels.items())))

    changes = on_line.get("model", {})
    allow_unknown = False
    for source, layer in (("file", network), ("--set", changes)):
        if "allow_unknown" in layer:
            allow_unknown = layer.pop("allow_unknown")
            record.append(("model.allow_unknown", allow_unknown, source))
            if not isinstance(allow_unknown, bool):
                raise illegal_value("model.allow_unknown", allow_unknown, source, "true or false")
    if describes and sources["model"] == "file":
        record += [(f"model.{key}", value, "--set") for key, value in changes.items()]
        _overlay(network, changes, "model")
        parsed = ModelConfig.from_dict(network, allow_unknown=allow_unknown)
        return Settings(engine, parsed, allow_unknown, tuple(record))
    if changes:
        raise ConfigError(
            f"--set changes {len(changes)} keys of a stored model: {', '.join(sorted(changes))}.",
            "Its numbers belong to its weights and come from its config.json.",
            "Remove them, or use a config file with a [model] table.",
        )
    return Settings(engine, None, allow_unknown, tuple(record))


def _from_env(env: Env) -> dict[str, Any]:
    values = {
        "model": env.hf_model_dir,
        "batch_invariant": env.batch_invariant,
        "compile_cache_dir": env.compile_cache_dir,
        "engram": env.engram,
        "prefill_truncation": env.prefill_truncation,
        "prefill_keep_tokens": env.prefill_keep_tokens,
        "nextn": env.nextn,
        "max_backtracking_tokens": env.max_backtracking_tokens,
        "varlen": env.varlen,
        "confidence_temperature": env.confidence_temperature,
        "cost_cache_dir": env.cost_cache_dir,
        "cost_cache_ttl": env.cost_cache_ttl,
        "kernels": dict(env.kernels),
    }
    return {key: value for key, value in values.items() if value is not None}


def _flat_kernels(layer: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`{"kernels": {op: name}}` as `{"kernels.op": name}`, so that layers merge op by op."""
    flat = {key: value for key, value in layer.items() if key != "kernels"}
    given = layer.get("kernels", {})
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    legal = isinstance(pairs, tuple | list) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    )
    if not legal or len({op for op, _ in pairs}) < len(pairs):
        raise illegal_value("engine.kernels", given, source, "a table of op = kernel name")
    return flat | {f"{_KERNELS}{op}": name for op, name in pairs}


def _checked(key: str, value: Any, source: str) -> Any:
    """`value` if it is legal for the engine field `key`; "auto" becomes None."""
    fields = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    if key.startswith(_KERNELS):
        legal, wanted = isinstance(value, str) and bool(value), "a kernel's name"
    elif key not in fields:
        raise unknown_key(f"engine.{key}", [f"engine.{name}" for name in fields])
    elif key in _OPTIONAL and value in (None, AUTO):
        return None
    elif key in _CHOICES:
        legal, wanted = value in _CHOICES[key], f"one of {', '.join(_CHOICES[key])}"
    elif key in _COUNTS:
        legal = isinstance(value, int) and not isinstance(value, bool) and value > 0
        wanted = "a positive integer"
    elif key in _AMOUNTS:
        legal = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        wanted = "an integer that is not negative"
    elif key in _SWITCHES:
        legal, wanted = isinstance(value, bool), "true or false"
    else:
        value = str(value) if isinstance(value, Path) else value
        legal, wanted = isinstance(value, str) and bool(value), "a text that is not empty"
    if not legal:
        raise illegal_value(f"engine.{key}", value, source, wanted)
    return value


def _overlay(table: dict[str, Any], changes: Mapping[str, Any], name: str) -> None:
    """Write `changes` into `table`, each of the type of the value that it replaces."""
    for key, value in changes.items():
        old = table.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _overlay(old, value, f"{name}.{key}")
            continue
        number = isinstance(old, int | float) and not isinstance(old, bool)
        fits = type(value) in (int, float) if number else isinstance(value, type(old))
        if isinstance(old, int) and number and isinstance(value, float):
            fits = False
        if old is not None and not fits:
            raise illegal_value(f"{name}.{key}", value, "--set", f"of the type of {old!r}")
        table[key] = value
