"""From a trained drafter to files: its tensors alone, and a model folder that carries them.

`python -m deepinfer_jax.training.drafter_export DRAFTER FOLDER --like MODEL` writes MODEL with the
drafter of the file DRAFTER (a run's `drafter.safetensors`) into FOLDER.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.export import encode_tensors
from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing
from deepinfer_jax.training.drafter_step import Method
from deepinfer_jax.training.eagle3 import eagle3_to_checkpoint
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.parameters import shapes, to_checkpoint

DRAFTER_FILE = "drafter.safetensors"
_PREFIX = "mtp."


def write_drafter(
    path: Path, weights: Mapping[str, np.ndarray], method: Method, config: ModelConfig
) -> int:
    """Write a drafter's tensors in the release's formats; returns the file's bytes.

    `dspark` and `dflash` write every `mtp.*` tensor of the inventory. DFlash has no heads, and
    zeros stand for them: the Markov bias is then exactly none and every confidence one half.
    `eagle3` writes `eagle3.*`. Metadata says which method it is.
    """
    if method == "eagle3":
        tensors, table = eagle3_to_checkpoint(weights, config)
    else:
        absent = {
            name: np.zeros(shape, np.float32)
            for name, shape in shapes(config, drafter=True).items()
            if name not in weights
        }
        tensors = to_checkpoint({**absent, **weights}, config, drafter=True)
        every = inventory(replace(config, vision=None), drafter=True)
        table = {name: spec for name, spec in every.items() if name.startswith(_PREFIX)}
    stored = encode_tensors(tensors, table)
    write_safetensors(path, stored, metadata={"format": "release", "drafter": method})
    return path.stat().st_size


def add_drafter(drafter: Path, model: Path, folder: Path) -> int:
    """Write `model` with the drafter of the file `drafter` into `folder`; returns the bytes of it.

    Tensors of the backbone are copied as they are stored; a drafter that is there is replaced.
    The folder is opened once as a check. Raises CheckpointError when the file holds no `mtp.*`
    tensors or other ones than the model's config describes, and when the folder does not load.
    """
    config = ModelConfig.from_file(model)
    found = open_checkpoint(drafter)
    every = inventory(replace(config, vision=None), drafter=True)
    expected = {
        name: spec.shape
        for weight, part in every.items()
        if weight.startswith(_PREFIX)
        for name, spec in part.stored(weight, "release").items()
    }
    wrong = [
        n for n, s in expected.items() if n not in found.tensors or found.tensors[n].shape != s
    ]
    wrong += [n for n in found.tensors if n not in expected]
    if wrong:
        raise CheckpointError(
            f"{drafter} differs from the drafter that {model} describes in {len(wrong)} tensors, "
            f"the first is {wrong[0]}.",
            "A model folder is refused when its tensors are not those of its config.",
            "Use a drafter that was trained for this model with --method dspark or dflash.",
        )
    backbone = open_checkpoint(model)
    kept = [name for name in backbone.tensors if not name.startswith(_PREFIX)]
    tensors = {name: backbone.array(name) for name in kept}
    tensors |= {name: found.array(name) for name in expected}
    metadata = {key: value for part in backbone.metadata for key, value in part.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        with replacing(folder / name) as temporary:
            temporary.write_bytes((model / name).read_bytes())
    write_safetensors(folder / "model.safetensors", tensors, metadata=metadata)
    load(folder, config, drafter=True, digest=False)
    return sum(path.stat().st_size for path in folder.iterdir())


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Put a trained drafter into a model folder.")
    parser.add_argument("drafter", type=Path, help=f"a run's {DRAFTER_FILE}")
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--like", type=Path, default=NANO, help="the target's model folder")
    given = parser.parse_args(argv)
    add_drafter(given.drafter, given.like, given.folder)


if __name__ == "__main__":
    main()
