"""One engine with random weights for all commands, and a way to type a command."""

import json
from pathlib import Path

import jax
import pytest
from tiny_model import write_tiny_model

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.entrypoints import cli
from deepinfer_jax.llm import LLM

_TOKENIZER_IDS = 253  # compressed ids of the tiny tokenizer


@pytest.fixture(scope="session")
def tiny_folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tiny network, random weights and a byte-level tokenizer."""
    content = json.loads((golden / "config.json").read_text())
    content["text_config"]["engram_compressed_vocab_size"] = _TOKENIZER_IDS
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(content))
    return write_tiny_model(folder, ModelConfig.from_file(folder), content)


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder: Path) -> LLM:
    """Its engine, one sequence at a time, so that two compiled programs serve every test."""
    return LLM(tiny_folder, max_num_seqs=1)


@pytest.fixture
def opened(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Makes commands use that engine; lists the arguments with which they opened one."""
    asked: list[dict] = []

    def open_engine(live, **arguments):
        asked.append(arguments)
        return tiny_llm

    for module in ("generate", "chat", "eval", "demo", "score", "replay"):
        monkeypatch.setattr(f"deepinfer_jax.entrypoints.{module}.open_engine", open_engine)
    return asked


@pytest.fixture
def deepinfer(capsys: pytest.CaptureFixture[str]):
    """Type a command: returns exit code, standard output and standard error."""

    def deepinfer(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert isinstance(caught.value.code, int)
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return deepinfer


@pytest.fixture
def no_compile_cache():
    """JAX keeps no compiled programs, neither before the test nor after it."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
