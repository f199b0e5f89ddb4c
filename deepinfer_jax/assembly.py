"""From settings to a network on a device: weights stacked and placed, kernels chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from deepinfer_jax.checkpoint.engram import EngramTable
from deepinfer_jax.checkpoint.inventory import scale_name
from deepinfer_jax.checkpoint.load import EngramPlace, Formats, Loaded, load
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.engram_hash import engram_hash, hash_rows
from deepinfer_jax.model.params import Params, ParamSpec, build_params, param_specs
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device, devices
from deepinfer_jax.ops.packed import Packed, Turned
from deepinfer_jax.ops.table import select
from deepinfer_jax.report.fit import Planner
from deepinfer_jax.report.plan import PACKED, MemoryPlan, stored_bytes
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
        plan: what is held once the caches are made, in bytes.
        digest: of the checkpoint's bytes.
    """

    network: Network
    params: Params
    tables: tuple[EngramTable, ...]
    mesh: Mesh
    plan: MemoryPlan
    digest: str | None

    @property
    def positions(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self.plan.positions


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


def _outside(folder: Path | None, config: ModelConfig) -> int:
    """Bytes of the stored Engram tables, scales included.

    From the files' headers where there are any, else as the release stores them.
    """
    if folder is None or (folder.is_dir() and not any(folder.glob("*.safetensors"))):
        return stored_bytes(param_specs(config).engram_tables, "packed", np.dtype(np.float32))
    stored = open_checkpoint(folder).tensors
    weights = [f"layers.{layer}.engram.embed.weight" for layer in config.engram_layer_ids]
    names = [name for weight in weights for name in (weight, scale_name(weight))]
    return sum(stored[name].nbytes for name in names if name in stored)


def _stacked(
    spec: ParamSpec, read: Callable[[str], np.ndarray], tell: Callable[[int], None]
) -> np.ndarray:
    """The leaf of `spec`, filled tensor by tensor, so that one more than the leaf is held."""
    names, out = spec.tensor_names(), None
    for i, row in enumerate(names):
        for e, name in enumerate(row):
            part = read(name)
            if out is None:
                out = np.empty((len(names), len(row), *part.shape), part.dtype)
            out[i, e] = part
            tell(part.nbytes)
    assert out is not None, "a leaf has at least one tensor"
    lead = spec.full_shape[: len(spec.full_shape) - len(spec.shape)]
    return out.reshape(*lead, *out.shape[2:])


def _teller(total: int, progress: Progress | None) -> Callable[[int], None]:
    """Adds up the bytes that it is called with and passes them on."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress("load", done, total)

    return tell


def _leaf(
    loaded: Loaded,
    dtype: np.dtype,
    place: Callable[[np.ndarray], jax.Array],
    tell: Callable[[int], None],
) -> Callable[[ParamSpec], Any]:
    """Makes one leaf of the tree and places it before the next is read."""

    def read(spec: ParamSpec) -> Any:
        def made(find: Callable[[str], np.ndarray]) -> Any:
            return place(_stacked(spec, find, tell))

        if loaded.formats == "packed" and spec.stored in PACKED:
            codes = made(lambda name: loaded.tensors[name])
            scale = made(lambda name: loaded.tensors[scale_name(name)].view(np.uint8))
            return Packed(codes=codes, scale=scale)
        kept = np.dtype(np.float32) if spec.stored == "f32" else dtype
        if spec.linear:
            return Turned(made(lambda name: loaded.tensors[name].astype(kept, copy=False).T))
        return made(lambda name: loaded.tensors[name].astype(kept, copy=False))

    return read


def planner_of(
    config: ModelConfig,
    engine: EngineConfig,
    device: Device,
    *,
    free: int | None,
    folder: Path | None = None,
    traced: bool = False,
    drafter: bool = False,
    drafts: int = 0,
) -> Planner:
    """What plans this network's memory on a device, which need not be there.

    Args:
        config: of the network.
        engine: decides arithmetic and kernels.
        device: where it is to run.
        free: bytes that the device can give; None to leave the check out.
        folder: holds the weights, if there are any. Only their headers are read, and only for
            Engram tables that share a CPU's memory.
        traced: the network records its inside (`trace`).
        drafter: the draft model is held too.
        drafts: tokens of a sequence that a step verifies at most.

    Raises:
        ConfigError: an Engram table of another size than its hash addresses. Planning raises it
            for a drafter that the config does not describe.
        NoKernelError: an op has no kernel for the device.
    """
    _check_engram(config)
    name = engine.arithmetic_on(device.kind)
    if traced and name == "release":
        name = "release_traced"
    ops = select(device, batch_invariant=engine.batch_invariant, overrides=dict(engine.kernels))
    network = Network(config, arithmetic(name, engine.cache_format), ops, traced, drafter)
    # Only a CPU's memory is the host's, where such tables lie.
    shared = engine.engram == "host" and device.kind == "cpu"
    return Planner(network, free, _outside(folder, config) if shared else 0, drafts)


def assemble(
    folder: Path,
    config: ModelConfig,
    engine: EngineConfig,
    token_map: np.ndarray,
    *,
    traced: bool = False,
    drafter: bool = False,
    drafts: int = 0,
    tokenizer_sha256: str | None = None,
    progress: Progress | None = None,
    available_bytes: int | None = None,
) -> Assembled:
    """Load the checkpoint in `folder` and place it, leaf by leaf.

    A weight that the release stores in BF16 is held in the arithmetic's type. Some exports store
    compressor weights and Engram gates in float32; those become BF16 under `release`, which is
    what the release holds, and changes nothing where the export only widened them.

    Args:
        folder: holds the weights.
        config: of the network.
        engine: how to run it.
        token_map: int32 [vocab], compressed token ids.
        traced: the network records its inside (`trace`).
        drafter: load the draft model too; a checkpoint without one is refused.
        drafts: tokens of a sequence that a step verifies at most, for the plan.
        tokenizer_sha256: of tokenizer.json; refused if the weights name another.
        progress: called with (phase, done bytes, total bytes).
        available_bytes: memory that the device can give; None to leave the check out.

    Raises:
        MemoryPlanError: weights and caches need more, before any weight is read.
        CheckpointError, ConfigError: as `load`; a length beyond the model's; a cache format that
            does not hold what the arithmetic defines.
    """
    device = Device.of(devices()[0])
    planner = planner_of(
        config,
        engine,
        device,
        folder=folder,
        free=available_bytes,
        traced=traced,
        drafter=drafter,
        drafts=drafts,
    )
    network, plan = planner.network, planner.fitting(engine)
    dtype = np.dtype(network.arithmetic.dtype)
    loaded = load(
        folder,
        config,
        formats=cast(Formats, engine.weights),
        drafter=drafter,
        engram=cast(EngramPlace, engine.engram),
        dtype="float32" if dtype == np.float32 else "bfloat16",
        tokenizer_sha256=tokenizer_sha256,
        progress=progress,
    )
    mesh = one_device_mesh()
    whole = replicated(mesh)
    tables = engine.engram == "device"
    specs = param_specs(config, tables=tables, drafter=drafter)
    total = stored_bytes(specs, engine.weights, dtype)
    leaf = _leaf(
        loaded,
        dtype,
        # Waiting lets the host's copy go before the next leaf is made.
        lambda array: jax.block_until_ready(jax.device_put(array, whole)),
        _teller(total, progress),
    )
    params = build_params(
        config,
        leaf,
        token_map=token_map,
        positions=plan.positions,
        tables=tables,
        drafter=drafter,
    )
    params = jax.device_put(params, whole)
    loaded.tensors.checkpoint.check_unchanged()
    outer = tuple(loaded.engram[layer] for layer in config.engram_layer_ids if loaded.engram)
    return Assembled(network, params, outer, mesh, plan, loaded.digest)


def engram_memory(
    tables: tuple[EngramTable, ...], rows: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, ...]:
    """Rows int32 [n, layers, columns] of host tables -> [n, columns * width] per layer."""
    return tuple(
        table.rows(rows[:, i]).reshape(rows.shape[0], -1).astype(dtype)
        for i, table in enumerate(tables)
    )


def host_memory(
    net: Assembled, token_map: np.ndarray
) -> Callable[[np.ndarray, int, int], tuple[np.ndarray, ...]]:
    """Looks up Engram rows of tables that are not on the device.

    Args:
        net: with its tables left in host memory or on disk.
        token_map: int32 [vocab], compressed token ids.

    Returns:
        A function of a sequence's ids (int [n]), a first and an end position; it gives what
        `engram_memory` gives for the positions [start, stop).
    """
    config = net.network.config
    constants, order = engram_hash(config), config.engram_max_ngram_size
    pad, dtype = int(token_map[config.engram_pad_token_id]), net.network.arithmetic.dtype
    compressed = token_map.copy()
    if config.image_token_id is not None:
        compressed[config.image_token_id] = -1  # as on the device, an image token blocks n-grams

    def memory(ids: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, ...]:
        # Only the look-back is needed, so a decode step stays cheap in a long sequence.
        first = max(0, start - order + 1)
        rows = hash_rows(constants, compressed[ids[first:stop]], pad)[start - first :]
        return engram_memory(net.tables, rows, dtype)

    return memory
