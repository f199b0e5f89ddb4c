"""Small networks that the training tests share."""

from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.formats import decode_q4, decode_q8, decode_rows
from deepinfer_jax.checkpoint.inventory import inventory, scale_name
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig

_DECODE = {"q8": decode_q8, "q4": decode_q4, "engram_table": decode_rows}


def tiny_checkpoint(golden: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """The golden tiny network and its dequantized backbone, float32 by release name."""
    config = ModelConfig.from_file(golden / "config.json")
    stored = open_checkpoint(golden / "model_release.safetensors")
    tensors = {}
    for name, spec in inventory(config, drafter=False).items():
        if name not in stored.tensors:
            continue
        value = stored.array(name)
        if spec.kind != "plain":
            value = _DECODE[spec.kind](name, value, stored.array(scale_name(name)))
        tensors[name] = value.astype(np.float32)
    return config, tensors
