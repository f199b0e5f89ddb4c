"""From trained masters to the shipped model folder, in the release's own formats.

`python -m deepinfer_jax.training.export RUN FOLDER` writes nano's checkpoint from a run's folder.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_jax.checkpoint.export import encode, export
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.carry import load
from deepinfer_jax.training.parameters import to_checkpoint


def release_tensors(
    weights: Mapping[str, np.ndarray], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Stored tensors of the backbone by release name: codes, scales, BF16 and float32.

    `weights` are masters by training name. Experts are split, `bias_vl` is copied from `bias`.
    """
    return encode(to_checkpoint(weights, config), config, drafter=False)


def export_run(run: Path, folder: Path, config_json: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a run's last state into `folder`; returns the folder."""
    config = ModelConfig.from_dict(config_json)
    weights = to_checkpoint(load(run, config).weights, config)
    return export(folder, weights, config_json, drafter=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Export a training run as a checkpoint.")
    parser.add_argument("run", type=Path, help="folder with state.json")
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    nano = Path(__file__).parent.parent / "models" / "nano" / "config.json"
    parser.add_argument("--config", type=Path, default=nano)
    given = parser.parse_args()
    export_run(given.run, given.folder, json.loads(given.config.read_text()))
