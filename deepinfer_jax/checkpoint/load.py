"""From a checkpoint on disk to NumPy arrays: everything is checked before anything is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import ml_dtypes
import numpy as np

from deepinfer_jax.checkpoint.digest import Progress, tree_digest
from deepinfer_jax.checkpoint.engram import EngramTable
from deepinfer_jax.checkpoint.formats import (
    check_codes,
    check_scales,
    decode_q4,
    decode_q8,
    decode_rows,
)
from deepinfer_jax.checkpoint.inventory import Spelling, TensorSpec, scale_name
from deepinfer_jax.checkpoint.match import Match, match
from deepinfer_jax.checkpoint.safetensors import DTYPES
from deepinfer_jax.checkpoint.shards import Checkpoint, open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError, MemoryPlanError

Formats = Literal["dequantized", "packed"]
EngramPlace = Literal["device", "host", "mmap"]
FloatType = Literal["bfloat16", "float32"]

_FLOAT = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_DECODE = {"q8": decode_q8, "q4": decode_q4, "engram_table": decode_rows}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's weights.

    Attributes:
        tensors: read-only arrays by release name. Dequantized: one `X.weight` per linear.
            Packed: `X.weight` codes (E4M3, or uint8 with two E2M1 codes) and `X.scale` E8M0.
        engram: tables left outside `tensors`, by layer; empty when they are on the device.
        spelling: what the files hold, `release` or `dequantized`.
        formats: what `tensors` holds, `dequantized` or `packed`.
        drafter: `mtp.*` is among the tensors.
        digest: of the stored bytes, or None when it was not asked for.
        bytes: what the tensors and the tables in host memory need.
        ignored: stored tensors that are copies of others and were not read.
    """

    tensors: Mapping[str, np.ndarray]
    engram: Mapping[int, EngramTable]
    spelling: Spelling
    formats: Formats
    drafter: bool
    digest: str | None
    bytes: int
    ignored: tuple[str, ...]


def load(
    path: str | Path,
    config: ModelConfig,
    *,
    formats: Formats = "dequantized",
    drafter: bool | None = None,
    engram: EngramPlace = "device",
    dtype: FloatType = "bfloat16",
    digest: bool = True,
    progress: Progress | None = None,
    available_bytes: int | None = None,
    workers: int | None = None,
) -> Loaded:
    """Load the checkpoint at `path` (a folder or one file) for `config`.

    `formats` keeps the release's codes and scales, or dequantizes them exactly. `dtype` is the
    type of dequantized weights; with float32, BF16 tensors are widened too (float32 ones are
    never narrowed). `engram` puts the tables among the tensors (`device`), or leaves them in host
    memory or on disk, to be read row by row. `drafter` as in `match`. Arrays whose bytes are as
    stored are memory-mapped views, so they cost memory when they are touched.

    `progress(phase, done_bytes, total_bytes)` is called for the phases `digest` and `load`.
    `available_bytes` is compared with what the result needs before any tensor is read; None
    leaves that to the caller (see `memory_need`).

    Raises CheckpointError for files that are damaged or do not match, MemoryPlanError when they
    do not fit, ConfigError for an unknown option. Nothing is returned half-loaded.
    """
    _check_option("formats", formats, get_args(Formats))
    _check_option("engram", engram, get_args(EngramPlace))
    _check_option("dtype", dtype, get_args(FloatType))
    checkpoint = open_checkpoint(path)
    matched = match(checkpoint, config, drafter=drafter)
    need = memory_need(checkpoint, matched, formats=formats, engram=engram, dtype=dtype)
    total = sum(need.values())
    if available_bytes is not None and total > available_bytes:
        largest = sorted(need, key=need.__getitem__, reverse=True)[:3]
        parts = ", ".join(f"{name} {_gib(need[name])}" for name in largest)
        raise MemoryPlanError(
            f"The weights of {checkpoint.path} need {_gib(total)} ({total:,} bytes) and "
            f"{_gib(available_bytes)} are available.",
            f"With formats={formats}, engram={engram}, dtype={dtype} the largest parts are "
            f"{parts}.",
            "Keep the formats packed, leave the Engram tables on disk, or use more devices.",
        )
    mapped = {n for n, s in matched.specs.items() if s.kind == "engram_table" and engram == "mmap"}
    _check_numbers(checkpoint, matched, skip=mapped)
    root = tree_digest(checkpoint, workers=workers, progress=progress) if digest else None

    tensors: dict[str, np.ndarray] = {}
    tables: dict[int, EngramTable] = {}
    done = 0
    for name, spec in matched.specs.items():
        if spec.kind == "engram_table" and engram != "device":
            layer = int(name.split(".")[1])
            tables[layer] = _table(checkpoint, name, in_memory=engram == "host", dtype=dtype)
        else:
            tensors |= _read(checkpoint, matched, name, spec, formats, dtype)
        done += _need_of(checkpoint, matched, name, spec, formats, engram, dtype)
        if progress is not None:
            progress("load", done, total)
    checkpoint.check_unchanged()
    return Loaded(
        tensors, tables, matched.spelling, formats, matched.drafter, root, total, matched.ignored
    )


def memory_need(
    checkpoint: Checkpoint,
    matched: Match,
    *,
    formats: Formats,
    engram: EngramPlace,
    dtype: FloatType,
) -> dict[str, int]:
    """Bytes that `load` with these options will hold, by component, from headers alone.

    Raises CheckpointError when packed formats are asked of a dequantized checkpoint.
    """
    if formats == "packed" and matched.spelling == "dequantized":
        raise CheckpointError(
            f"{checkpoint.path} is dequantized, and packed formats were asked for.",
            "It has no scales, and choosing new ones could round the weights.",
            "Load it with formats=dequantized, or export it in the release formats.",
        )
    need: dict[str, int] = {}
    for name, spec in matched.specs.items():
        nbytes = _need_of(checkpoint, matched, name, spec, formats, engram, dtype)
        need[spec.component] = need.get(spec.component, 0) + nbytes
    return need


def _need_of(
    checkpoint: Checkpoint,
    matched: Match,
    name: str,
    spec: TensorSpec,
    formats: Formats,
    engram: EngramPlace,
    dtype: FloatType,
) -> int:
    stored = [checkpoint.tensors[n].nbytes for n in spec.stored(name, matched.spelling)]
    if spec.kind == "engram_table" and engram != "device":
        return sum(stored) if engram == "host" else 0
    if len(stored) == 2:
        wide = spec.parameters * _FLOAT[dtype].itemsize
        return sum(stored) if formats == "packed" else wide
    return spec.parameters * _held_type(checkpoint, name, dtype).itemsize


def _held_type(checkpoint: Checkpoint, name: str, dtype: FloatType) -> np.dtype:
    """Type in the result of a tensor without scales: as stored, or widened to float32."""
    stored = DTYPES[checkpoint.tensors[name].dtype]
    return stored if dtype == "bfloat16" else _FLOAT["float32"]


def _check_numbers(checkpoint: Checkpoint, matched: Match, *, skip: set[str]) -> None:
    """Codes that stand for no number are refused before any weight is used."""
    if matched.spelling == "dequantized":
        return
    for name, spec in matched.specs.items():
        if spec.kind == "plain" or name in skip:
            continue
        check_scales(scale_name(name), checkpoint.array(scale_name(name)))
        if spec.kind != "q4":
            check_codes(name, checkpoint.array(name))


def _read(
    checkpoint: Checkpoint,
    matched: Match,
    name: str,
    spec: TensorSpec,
    formats: Formats,
    dtype: FloatType,
) -> dict[str, np.ndarray]:
    array = checkpoint.array(name)
    if spec.kind == "plain" or matched.spelling == "dequantized":
        held = array.astype(_held_type(checkpoint, name, dtype), copy=False)
        held.flags.writeable = False
        return {name: held}
    scales = checkpoint.array(scale_name(name))
    if formats == "packed":
        codes = array.view(np.uint8) if spec.kind == "q4" else array
        return {name: codes, scale_name(name): scales}
    decoded = _DECODE[spec.kind](name, array, scales, _FLOAT[dtype])
    decoded.flags.writeable = False
    return {name: decoded}


def _table(checkpoint: Checkpoint, name: str, *, in_memory: bool, dtype: FloatType) -> EngramTable:
    names = [n for n in (name, scale_name(name)) if n in checkpoint.tensors]
    if not in_memory:
        for stored in names:
            checkpoint.expect_random_reads(stored)
    codes, *scales = (checkpoint.array(n) for n in names)
    if in_memory:
        codes, scales = codes.copy(), [s.copy() for s in scales]
    return EngramTable(name, codes, scales[0] if scales else None, _FLOAT[dtype])


def _check_option(name: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigError(
            f"{name} is {value!r}.",
            f"It is one of {', '.join(legal)}.",
            f"Choose one of them for {name}.",
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f} GiB"
