"""The small reference network of the golden data, assembled in one arithmetic."""

from pathlib import Path

import numpy as np

from deepinfer_jax.assembly import Assembled, assemble
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.settings import EngineConfig


def golden_network(
    golden: Path, arithmetic: str, *, drafter: bool = False, **engine: object
) -> Assembled:
    config = ModelConfig.from_file(golden)
    asked = EngineConfig(model=str(golden), arithmetic=arithmetic, **engine)
    token_map = np.load(golden / "engram.npz")["tiny_token_map"]
    file = golden / "model_release.safetensors"
    return assemble(file, config, asked, token_map, traced=True, drafter=drafter)


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
