"""A five-layer network with every kind of layer and random weights, as a complete model folder.

It is shorter than the golden network only because a test waits for every program it compiles.
"""

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from tiny_model import tiny_weights

from deepinfer_jax.checkpoint.export import encode
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine import engine as engine_module
from deepinfer_jax.engine.buckets import plan_buckets
from deepinfer_jax.llm import LLM
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.settings import package_folder

Weights = dict[str, np.ndarray]
Sizes = tuple[Bucket, ...]
SLOTS, CHUNK, LIMIT = 4, 64, 1088


def short_config(**changes: object) -> dict[str, Any]:
    """The object of config.json."""
    raw = tomllib.loads((package_folder("configs") / "tiny.toml").read_text())["model"]
    layers = {
        "num_hidden_layers": 5,
        "max_position_embeddings": LIMIT,
        "compress_ratios": [0, 0, 2, 1, 1, 0, 0, 0],
        "kv_source_layer_ids": [2, 3],
        "index_source_layer_ids": [2, 3, 4],
        "engram_layer_ids": [1, 2],
        "candidate_source_layer_id": 3,
        "dspark_target_layer_ids": [2, 3, 4],
    }
    return raw | layers | changes


def shorter_config() -> dict[str, Any]:
    """Two layers: a source of pairs with an Engram, and a source of every token."""
    return short_config(
        num_hidden_layers=2,
        compress_ratios=[2, 1, 0, 0, 0],
        kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1],
        candidate_source_layer_id=1,
        engram_layer_ids=[0],
        engram_num_embeddings=[630],
        dspark_target_layer_ids=[0, 1],
    )


def write_short_model(
    folder: Path,
    raw: dict[str, Any] | None = None,
    *,
    change: Callable[[Weights], None] = lambda weights: None,
    spoil: Callable[[Weights], None] = lambda stored: None,
    drafter: bool = False,
) -> Path:
    """Write the folder; `change` may alter the weights, `spoil` the tensors as they are stored.

    `raw` is the object of config.json, `short_config()` where it is left out.
    """
    raw = raw or short_config()
    config = ModelConfig.from_dict(raw)
    weights = tiny_weights(config, drafter=drafter)
    change(weights)
    stored = {k: v.copy() for k, v in encode(weights, config, drafter=drafter).items()}
    spoil(stored)
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(package_folder("models") / "tiny_tokenizer" / "tokenizer.json", folder)
    return folder


def open_llm(folder: Path, compiled: Path, **engine: Any) -> LLM:
    """The engine of all these tests: 4 slots, prompts in chunks of 64, no program ever late."""
    sizes = {"max_num_seqs": SLOTS, "max_num_batched_tokens": CHUNK, "compile_cache_dir": compiled}
    return LLM(folder, **(sizes | {"late_compile": "error"} | engine))


def largest(sizes: Sizes) -> Sizes:
    """The size that holds every step."""
    return sizes[-1:]


def of_all_slots(sizes: Sizes) -> Sizes:
    """No sizes for fewer sequences than there are slots."""
    return tuple(size for size in sizes if size.parts == sizes[-1].parts)


@contextmanager
def fewer_sizes(chosen: Callable[[Sizes], Sizes]) -> Iterator[None]:
    """Engines that are made here pad their steps to the sizes that `chosen` leaves of all.

    A test waits for the program of every size.
    """

    def planned(*limits: Any, **options: Any) -> Sizes:
        return chosen(plan_buckets(*limits, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "plan_buckets", planned)
        yield


@contextmanager
def compiled_programs(base: Path) -> Iterator[Path]:
    """A folder that keeps programs for all test modules of this run, and for no other run."""
    yield (base.parent if base.name.startswith("popen-") else base) / "compiled"
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()


def letters(text: str) -> list[int]:
    """Ids of plain text in the byte tokenizer."""
    return [3 + byte for byte in text.encode()]
