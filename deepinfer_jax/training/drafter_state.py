"""What a drafter's training piece hands to the next: everything, exactly, in small files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing
from deepinfer_jax.training.carry import PIECE_BYTES, STATE, read_state
from deepinfer_jax.training.drafter_step import DrafterState


@dataclass(frozen=True)
class Header:
    """What belongs to a state: the step, the method and settings of its run, and its files."""

    step: int
    method: str
    settings: dict[str, Any]
    files: tuple[str, ...] = ()


def save(folder: Path, state: DrafterState, method: str, settings: Mapping[str, Any]) -> None:
    """Write weights and moments as they are (files of at most 15 MiB), then `state.json`.

    The files carry the step in their names and `state.json` names them, so that at any moment it
    names a complete state; those of an older one are removed last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step = int(state.step)
    groups: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, leaf in _named(jax.device_get(state)).items():
        array = np.asarray(leaf)
        if groups[-1] and size + array.nbytes > PIECE_BYTES - (1 << 20):
            groups.append({})
            size = 0
        groups[-1][name] = array
        size += array.nbytes
    files = [f"state-{step:07d}-{i}.safetensors" for i in range(len(groups))]
    for name, group in zip(files, groups, strict=True):
        write_safetensors(folder / name, group)
    header = {"step": step, "method": method, "settings": dict(settings), "files": files}
    with replacing(folder / STATE) as temporary:
        temporary.write_text(json.dumps(header, indent=1))
    for path in folder.glob("state-*.safetensors"):
        if path.name not in files:
            path.unlink()


def read_header(folder: Path) -> Header:
    """The header of the folder's state. Raises CheckpointError when there is none."""
    raw = read_state(folder, "--out")
    return Header(raw["step"], raw["method"], raw["settings"], tuple(raw["files"]))


def load(folder: Path, like: DrafterState) -> DrafterState:
    """The folder's state, bit for bit; `like` gives the structure.

    Raises CheckpointError when there is none, or when it belongs to another network or method.
    """
    stored: dict[str, np.ndarray] = {}
    for name in read_header(folder).files:
        part = open_checkpoint(folder / name)
        stored |= {tensor: part.array(tensor) for tensor in part.tensors}
    expected = _named(like)
    wrong = [n for n, leaf in expected.items() if n not in stored or stored[n].shape != leaf.shape]
    wrong += [n for n in stored if n not in expected]
    if wrong:
        raise CheckpointError(
            f"The state in {folder} differs from the run in {len(wrong)} arrays, the first is "
            f"{wrong[0]}.",
            "It belongs to another network or method.",
            "Resume with the model and method that the run was started with.",
        )
    leaves = [jax.numpy.asarray(stored[name]) for name in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _named(state: DrafterState) -> dict[str, Any]:
    """Leaves in their order, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
