"""Whether an opened checkpoint is exactly the network that a config describes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deepinfer_jax.checkpoint.inventory import (
    Spelling,
    TensorSpec,
    inventory,
    scale_name,
    stored_inventory,
)
from deepinfer_jax.checkpoint.shards import Checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError

_WIDE = ("BF16", "F32", "F16", "F64")


@dataclass(frozen=True)
class Match:
    """A checkpoint that fits its config.

    Attributes:
        spelling: `release` (packed codes with `.scale` tensors) or `dequantized`.
        specs: the weights to load, by name.
        drafter: `mtp.*` is among them.
        ignored: copies of the embedding and head that old exports carry under `mtp.*`; they are
            tied to the backbone's and never read.
    """

    spelling: Spelling
    specs: Mapping[str, TensorSpec]
    drafter: bool
    ignored: tuple[str, ...]


def match(checkpoint: Checkpoint, config: ModelConfig, *, drafter: bool | None) -> Match:
    """Compare every stored name, shape and type with the inventory of `config`.

    `drafter` True demands the `mtp.*` weights, False leaves them out, None takes them if they are
    there. They are complete or wholly absent; a part is refused whatever is asked. Raises
    CheckpointError naming every tensor that is missing, unexpected or of another shape or type,
    and ConfigError when the config's widths cannot be stored in the release formats.
    """
    stages = config.num_nextn_predict_layers
    if drafter and not stages:
        inventory(config, drafter=True)  # refuses, saying why
    specs = inventory(config, drafter=False)
    draft_specs = {}
    if stages:
        every = inventory(config, drafter=True)
        draft_specs = {name: spec for name, spec in every.items() if name not in specs}
    copies = {f"mtp.{k}.{part}.weight" for k in range(stages) for part in ("embed", "head")}
    ignored = tuple(sorted(copies & set(checkpoint.tensors)))
    names = set(checkpoint.tensors) - copies

    spelling = _spelling_of(checkpoint, names, {**specs, **draft_specs})
    has_drafter = any(name.startswith("mtp.") for name in names) and bool(stages)
    if has_drafter:
        _check_drafter_complete(checkpoint, names, stored_inventory(draft_specs, spelling))
    elif drafter:
        raise CheckpointError(
            f"{checkpoint.path} has no mtp.* tensors, and a drafter was asked for.",
            f"The config describes {stages} draft stages, but this export left their weights out.",
            "Set the draft length to 0, or use a checkpoint with a drafter.",
        )
    expected = {**specs, **draft_specs} if has_drafter else specs
    _check_stored(checkpoint, names, expected, spelling)
    use_drafter = has_drafter and drafter is not False
    return Match(spelling, expected if use_drafter else specs, use_drafter, ignored)


def _spelling_of(
    checkpoint: Checkpoint, names: set[str], specs: Mapping[str, TensorSpec]
) -> Spelling:
    """`release` if any scale is stored; then no quantized weight may be stored in a wide type."""
    if not any(name.endswith(".scale") for name in names):
        return "dequantized"
    quantized = [n for n, spec in specs.items() if spec.kind != "plain" and n in names]
    wide = [n for n in quantized if checkpoint.tensors[n].dtype in _WIDE]
    if wide:
        scales = sum(scale_name(n) in names for n in quantized)
        raise CheckpointError(
            f"{checkpoint.path} mixes two spellings: {scales} weights have scales and "
            f"{len(wide)} are stored wide: {', '.join(sorted(wide))}.",
            "A checkpoint is either in the release formats throughout or dequantized throughout.",
            "Export it again in one of the two.",
        )
    return "release"


def _check_drafter_complete(
    checkpoint: Checkpoint, names: set[str], expected: Mapping[str, object]
) -> None:
    missing = sorted(set(expected) - names)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has a part of the drafter: {len(missing)} of {len(expected)} "
            f"mtp.* tensors are missing: {', '.join(missing)}.",
            "The mtp.* set is complete or wholly absent; a part of it means a damaged export.",
            "Export the checkpoint again, with the whole drafter or without it.",
        )


def _check_stored(
    checkpoint: Checkpoint, names: set[str], specs: Mapping[str, TensorSpec], spelling: Spelling
) -> None:
    expected = stored_inventory(specs, spelling)
    problems = []
    problems += _listed("missing", sorted(set(expected) - names))
    problems += _listed("unexpected", sorted(names - set(expected)))
    both = sorted(names & set(expected))
    problems += _listed(
        "of another shape",
        [
            f"{n} (stored {list(checkpoint.tensors[n].shape)}, needed {list(expected[n].shape)})"
            for n in both
            if checkpoint.tensors[n].shape != expected[n].shape
        ],
    )
    problems += _listed(
        "of another type",
        [
            f"{n} (stored {checkpoint.tensors[n].dtype}, needed {' or '.join(expected[n].dtypes)})"
            for n in both
            if checkpoint.tensors[n].dtype not in expected[n].dtypes
        ],
    )
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} ({spelling} spelling, {len(names)} tensors) does not match its "
            f"config, which needs {len(expected)}: {'; '.join(problems)}.",
            "The inventory follows from config.json, and with any other set of tensors the "
            "network would be another one.",
            "Check that config.json belongs to these weights, or export the checkpoint again.",
        )


def _listed(kind: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"{len(names)} {kind}: {', '.join(names)}"] if names else []
