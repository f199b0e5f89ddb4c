"""Where a model's files lie: a packaged model, a folder, or a repository that is downloaded."""

import dataclasses
from pathlib import Path

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.checkpoint.hub import resolve_model
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError, DeepInferError
from deepinfer_jax.text.tokenizer import Tokenizer


def located(
    asked: settings.Settings, env: environment.Env
) -> tuple[settings.Settings, Path, str | None]:
    """The settings with a folder for the model, and the commit if it is downloaded."""
    if asked.network is not None:
        raise ConfigError(
            f"The config {asked.engine.model} describes a network, but no weights.",
            "LLM answers with weights; a network without them can only be planned.",
            "Name a model folder, a repository, or the packaged model nano.",
        )
    try:
        folder = asked.folder
        assert folder is not None, "a stored model has a folder"
        return asked, folder, None
    except DeepInferError:
        if "/" not in asked.engine.model or Path(asked.engine.model).exists():
            raise
    found = resolve_model(asked.engine.model, local_dir_override=env.hf_model_dir)
    engine = dataclasses.replace(asked.engine, model=str(found.path))
    return dataclasses.replace(asked, engine=engine), found.path, found.commit


def open_tokenizer(given: str | Path | None, folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer in `given`, a file or a folder; without it, the model folder's own."""
    path = Path(given) if given is not None else folder
    if path.is_file():
        return Tokenizer.from_file(path, config)
    return Tokenizer.from_folder(path, config)
