"""Small networks that the training tests share."""

import json
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.smoke import smoke_config


def tiny_checkpoint(golden: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The golden tiny network and its dequantized backbone, float32 by release name."""
    config = ModelConfig.from_file(golden / "config.json")
    path = golden / "model_release.safetensors"
    loaded = load(path, config, drafter=False, dtype="float32", digest=False)
    return config, dict(loaded.tensors)


def smoke_folder(folder: Path, config: ModelConfig | None = None) -> Path:
    """A folder with the smoke network's, or `config`'s, config.json and nano's tokenizer.json."""
    raw = json.loads((NANO / "config.json").read_text())
    numbers = (config or smoke_config()).digest_dict()
    raw["text_config"] |= {k: numbers[k] for k in raw["text_config"] if k in numbers}
    raw["text_config"]["rope_scaling"]["rope_type"] = "yarn"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
    return folder
