"""From trained masters to a model folder, in the release's own formats or as bfloat16.

`python -m deepinfer_jax.training.export RUN FOLDER` writes nano's folder from a run's folder.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from deepinfer_jax.checkpoint.export import export
from deepinfer_jax.checkpoint.inventory import Spelling
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.files import replacing
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.training.carry import load
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.parameters import to_checkpoint


def export_run(
    run: Path, folder: Path, *, like: Path = NANO, spelling: Spelling = "release"
) -> Path:
    """Write a run's last state as a complete model folder; returns the folder.

    Args:
        run: folder with state.json.
        folder: gets tokenizer.json, model.safetensors and config.json.
        like: model folder of the same network; config.json and tokenizer.json are taken from it.
        spelling: `release` (codes and scales) or `dequantized` (bfloat16).

    Raises ConfigError or CheckpointError when `like` or the run cannot be read.
    """
    config = ModelConfig.from_file(like)
    config_json = json.loads((like / "config.json").read_text())
    digest = Tokenizer.from_folder(like, config).digest
    weights = to_checkpoint(load(run, config).weights, config)
    text = (like / "tokenizer.json").read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "tokenizer.json") as temporary:
        temporary.write_bytes(text)
    return export(
        folder, weights, config_json, drafter=False, spelling=spelling, tokenizer_sha256=digest
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Export a training run as a model folder.")
    parser.add_argument("run", type=Path, help="folder with state.json")
    parser.add_argument("folder", type=Path, help="where the model is written")
    parser.add_argument("--spelling", choices=get_args(Spelling), default="release")
    parser.add_argument(
        "--like", type=Path, default=NANO, help="folder whose config and tokenizer are taken"
    )
    given = parser.parse_args(argv)
    export_run(given.run, given.folder, like=given.like, spelling=given.spelling)


if __name__ == "__main__":
    main()
