"""From settings to a network on a device: weights stacked and placed, kernels chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.checkpoint.engram import EngramTable
from deepinfer_jax.checkpoint.inventory import scale_name
from deepinfer_jax.checkpoint.load import EngramPlace, Formats, Loaded, load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.engram_hash import engram_hash
from deepinfer_jax.model.params import Params, ParamSpec, build_params, stack
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.packed import Packed
from deepinfer_jax.ops.table import select
from deepinfer_jax.runner.compile import one_device_mesh, replicated
from deepinfer_jax.settings import EngineConfig

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Assembled:
    """A network that can run.

    Attributes:
        network: configuration, arithmetic and kernels.
        params: weights on the device.
        tables: Engram tables left in host memory or on disk, in layer order; empty otherwise.
        mesh: the devices.
        positions: longest sequence, prompt and output together, in tokens.
        digest: of the checkpoint's bytes.
    """

    network: Network
    params: Params
    tables: tuple[EngramTable, ...]
    mesh: Mesh
    positions: int
    digest: str | None


def max_length(engine: EngineConfig, config: ModelConfig) -> int:
    """The longest sequence in tokens: as asked, at most what the model was made for."""
    limit = config.max_position_embeddings
    if engine.max_model_len is None:
        return limit
    if engine.max_model_len > limit:
        raise ConfigError(
            f"engine.max_model_len is {engine.max_model_len}; the model's limit is {limit}.",
            "Beyond its limit the rotary tables were never trained.",
            f"Set it to at most {limit}, or leave it out.",
        )
    return engine.max_model_len


def _check_engram(config: ModelConfig) -> None:
    """Tables of another size would be read at rows that mean something else."""
    needed = engram_hash(config).num_embeddings
    if needed != config.engram_num_embeddings:
        raise ConfigError(
            f"engram_num_embeddings is {list(config.engram_num_embeddings)}, but the hash of this "
            f"config addresses {list(needed)} rows.",
            "The number of rows follows from engram_vocab_size, the heads and the n-gram sizes.",
            "Use the config.json of the same checkpoint.",
        )


def _leaf(loaded: Loaded, dtype: np.dtype) -> Callable[[ParamSpec], Any]:
    def read(spec: ParamSpec) -> Any:
        if loaded.formats == "packed" and spec.stored in ("q8", "q4", "table"):
            codes: Any = stack(spec, lambda name: loaded.tensors[name])
            scale: Any = stack(spec, lambda name: loaded.tensors[scale_name(name)].view(np.uint8))
            return Packed(codes=codes, scale=scale)
        kept = np.dtype(np.float32) if spec.stored == "f32" else dtype
        return stack(spec, lambda name: loaded.tensors[name].astype(kept, copy=False))

    return read


def assemble(
    folder: Path,
    config: ModelConfig,
    engine: EngineConfig,
    token_map: np.ndarray,
    *,
    traced: bool = False,
    progress: Progress | None = None,
    available_bytes: int | None = None,
) -> Assembled:
    """Load the checkpoint in `folder` and place it.

    Args:
        folder: holds the weights.
        config: of the network.
        engine: how to run it.
        token_map: int32 [vocab], compressed token ids.
        traced: the network records its inside (`trace`).
        progress: called with (phase, done bytes, total bytes).
        available_bytes: memory there is; None to leave the check out.
    """
    _check_engram(config)
    device = Device.of(jax.devices()[0])
    name = engine.arithmetic_on(device.kind)
    if traced and name == "release":
        name = "release_traced"
    ops = select(device, batch_invariant=engine.batch_invariant, overrides=dict(engine.kernels))
    network = Network(config, arithmetic(name), ops, traced)
    wide = network.arithmetic.dtype == np.float32
    loaded = load(
        folder,
        config,
        formats=cast(Formats, engine.weights),
        drafter=None,
        engram=cast(EngramPlace, engine.engram),
        dtype="float32" if wide else "bfloat16",
        progress=progress,
        available_bytes=available_bytes,
    )
    mesh = one_device_mesh()
    positions = max_length(engine, config)
    params = build_params(
        config,
        _leaf(loaded, np.dtype(np.float32) if wide else np.dtype(ml_dtypes.bfloat16)),
        token_map=token_map,
        positions=positions,
        tables=engine.engram == "device",
    )
    params = jax.device_put(params, replicated(mesh))
    tables = tuple(loaded.engram[layer] for layer in config.engram_layer_ids if loaded.engram)
    return Assembled(network, params, tables, mesh, positions, loaded.digest)


def engram_memory(
    tables: tuple[EngramTable, ...], rows: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, ...]:
    """Rows int32 [n, layers, columns] of host tables -> [n, columns * width] per layer."""
    return tuple(
        table.rows(rows[:, i]).reshape(rows.shape[0], -1).astype(dtype)
        for i, table in enumerate(tables)
    )
