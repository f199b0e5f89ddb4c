"""A checkpoint in memory, to be damaged and written again."""

from pathlib import Path

import numpy as np
import pytest

from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig


@pytest.fixture(scope="session")
def config(golden: Path) -> ModelConfig:
    return ModelConfig.from_file(golden / "config.json")


@pytest.fixture(scope="session")
def release_file(golden: Path) -> Path:
    return golden / "model_release.safetensors"


@pytest.fixture(scope="session")
def _release_tensors(release_file: Path) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(release_file)
    return {name: checkpoint.array(name) for name in checkpoint.tensors}


@pytest.fixture
def release_tensors(_release_tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stored tensors of the release spelling; the dictionary may be changed."""
    return dict(_release_tensors)
