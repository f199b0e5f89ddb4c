"""A complete model folder of the tiny config with random weights from a fixed seed."""

import shutil
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.export import encode
from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.settings import package_folder


def tiny_weights(
    config: ModelConfig, seed: int = 0, *, drafter: bool = False
) -> dict[str, np.ndarray]:
    """Weights whose sublayer outputs stay below the residual, so that rounding stays small."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, spec in inventory(config, drafter=drafter).items():
        if name.endswith("norm.weight"):
            value = 1 + 0.1 * rng.standard_normal(spec.shape)
        elif name == "embed.weight" or ".engram.embed" in name:
            value = rng.standard_normal(spec.shape)
        elif name.endswith("_base"):
            value = rng.standard_normal(spec.shape) * 0.1 - 0.5
        elif name.endswith("_scale"):
            value = np.full(spec.shape, 0.3)
        else:
            value = rng.standard_normal(spec.shape) * spec.shape[-1] ** -0.5
        weights[name] = value.astype(np.float32)
    return weights


def write_tiny_model(folder: Path, config: ModelConfig, config_json: dict) -> Path:
    """Write config.json, model.safetensors and tokenizer.json into `folder`."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    stored = encode(tiny_weights(config), config, drafter=False)
    write_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(config_json))
    shutil.copy(package_folder("models") / "tiny_tokenizer" / "tokenizer.json", folder)
    return folder
