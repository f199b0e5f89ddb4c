"""What one piece of a run hands to the next: bfloat16 weights in small files, and its state."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint import load as checkpoint
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing
from deepinfer_jax.training.parameters import from_checkpoint, shapes, specs

PIECE_BYTES = 15 << 20
STATE = "state.json"


@dataclass(frozen=True)
class Carried:
    """Where a run stands: step, settings by name (none at a model folder), float32 masters."""

    step: int
    settings: dict[str, Any]
    weights: dict[str, np.ndarray]


def save(
    folder: Path,
    step: int,
    settings: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    config: ModelConfig,
) -> None:
    """Write `weights_{i}.safetensors` (each at most 15 MiB) and, last, `state.json`.

    Tensors that the release keeps in float32 stay so, the others are rounded to bfloat16. An older
    `state.json` goes first, so that a save cut short leaves no mixture that `load` would take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    kinds = specs(config)
    groups: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name in sorted(weights):
        exact = kinds[name].dtypes[0] == "F32"
        tensor = np.asarray(weights[name]).astype(np.float32 if exact else ml_dtypes.bfloat16)
        if size + tensor.nbytes > PIECE_BYTES - (1 << 20) and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    for i, group in enumerate(groups):
        write_safetensors(folder / f"weights_{i}.safetensors", group)
    text = json.dumps({"step": step, "pieces": len(groups), "settings": dict(settings)}, indent=1)
    with replacing(folder / STATE) as temporary:
        temporary.write_text(text)


def read_state(folder: Path, option: str) -> dict[str, Any]:
    """The folder's `state.json`. Raises CheckpointError, which names `option`, without one."""
    try:
        return json.loads((folder / STATE).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {STATE}.",
            "A piece of training continues from the folder that the piece before it wrote.",
            f"Check the path given to {option}, or leave --resume out to start from scratch.",
        ) from None


def load(folder: Path, config: ModelConfig) -> Carried:
    """Read what `save` wrote.

    Raises CheckpointError when the folder holds no state, or weights of another network.
    """
    state = read_state(folder, "--resume")
    weights: dict[str, np.ndarray] = {}
    for i in range(state["pieces"]):
        part = open_checkpoint(folder / f"weights_{i}.safetensors")
        weights |= {name: part.array(name).astype(np.float32) for name in part.tensors}
    expected = shapes(config)
    wrong = [n for n in expected if n not in weights or weights[n].shape != expected[n]]
    wrong += [n for n in weights if n not in expected]
    if wrong:
        raise CheckpointError(
            f"The weights in {folder} differ from the config in {len(wrong)} tensors, "
            f"the first is {wrong[0]}.",
            "They belong to another network.",
            "Resume with the config that the run was started with.",
        )
    return Carried(state["step"], state["settings"], weights)


def is_model(folder: Path) -> bool:
    """Whether the folder holds a model and not what `save` wrote."""
    names = ("config.json", "model.safetensors")
    return not (folder / STATE).exists() and all((folder / name).exists() for name in names)


def from_model(folder: Path, config: ModelConfig, step: int) -> Carried:
    """Masters out of a model folder of either spelling, to go on at `step` of a new schedule.

    Raises CheckpointError when the folder's config is not `config`, or the files are damaged.
    """
    found = dataclasses.asdict(ModelConfig.from_file(folder))
    differ = [k for k, v in dataclasses.asdict(config).items() if found[k] != v]
    if differ:
        raise CheckpointError(
            f"The config of {folder} differs from the trained network's in {', '.join(differ)}.",
            "The same weights compute something else in another network.",
            "Give a folder of the network that is trained.",
        )
    loaded = checkpoint.load(folder, config, drafter=False, dtype="float32", digest=False)
    return Carried(step, {}, from_checkpoint(loaded.tensors, config))
