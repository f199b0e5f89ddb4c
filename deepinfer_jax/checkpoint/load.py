"""From a checkpoint on disk to NumPy arrays: all is checked first, then decoded one by one."""

from collections.abc import Iterator, Mapping
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
from deepinfer_jax.checkpoint.shards import Checkpoint, open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError

Formats = Literal["dequantized", "packed"]
EngramPlace = Literal["device", "host", "mmap"]
FloatType = Literal["bfloat16", "float32"]

_FLOAT = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_DECODE = {"q8": decode_q8, "q4": decode_q4, "engram_table": decode_rows}


@dataclass(frozen=True)
class Weights(Mapping[str, np.ndarray]):
    """Weights by release name, decoded when they are looked up and not kept.

    Dequantized: one `X.weight` per linear. Packed: `X.weight` codes (E4M3, or uint8 with two E2M1
    codes) and `X.scale` E8M0. Arrays are read-only; those whose bytes are as stored are views of
    the memory-mapped file. A look-up raises CheckpointError when a decoded value is no finite
    number of `dtype`.

    Attributes:
        checkpoint: what is read.
        specs: of every weight, in the order of the inventory; None for scales.
        spelling: of the files.
        formats: `dequantized` or `packed`.
        dtype: of dequantized weights.
    """

    checkpoint: Checkpoint
    specs: Mapping[str, TensorSpec | None]
    spelling: Spelling
    formats: Formats
    dtype: np.dtype

    def __getitem__(self, name: str) -> np.ndarray:
        spec, stored = self.specs[name], self.checkpoint.array(name)
        if spec is None:
            return stored
        if spec.kind == "plain" or self.spelling == "dequantized":
            wide = self.dtype == np.float32
            array = stored.astype(np.float32 if wide else stored.dtype, copy=False)
        elif self.formats == "packed":
            return stored.view(np.uint8) if spec.kind == "q4" else stored
        else:
            scales = self.checkpoint.array(scale_name(name))
            array = _DECODE[spec.kind](name, stored, scales, self.dtype)
        array.flags.writeable = False
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that fits its config.

    Attributes:
        tensors: the weights by release name, decoded one by one.
        engram: tables left outside `tensors`, by layer; empty when they are on the device.
        spelling: what the files hold, `release` or `dequantized`.
        formats: what `tensors` holds, `dequantized` or `packed`.
        drafter: `mtp.*` is among the tensors.
        digest: of the stored bytes, or None when it was not asked for.
        ignored: stored tensors that are copies of others and are not read.
    """

    tensors: Weights
    engram: Mapping[int, EngramTable]
    spelling: Spelling
    formats: Formats
    drafter: bool
    digest: str | None
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
    tokenizer_sha256: str | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Loaded:
    """Open and check the checkpoint at `path` (a folder or one file) for `config`.

    `formats` keeps the release's codes and scales, or dequantizes them exactly. `dtype` is the
    type of dequantized weights; with float32, BF16 tensors are widened too (float32 ones are
    never narrowed). `engram` puts the tables among the tensors (`device`), or leaves them in host
    memory or on disk, to be read row by row. `drafter` as in `match`; weights that are left out
    are checked by name, shape and type, and not read. `tokenizer_sha256`, of the tokenizer.json in
    use, is compared with the one that the weights name, if they name one.

    Tensors cost memory when they are looked up, tables in host memory at once.
    `progress("digest", done_bytes, total_bytes)` is called while the digest is computed. When all
    is read, `tensors.checkpoint.check_unchanged` says whether it was one version of the files.

    Raises CheckpointError for files that are damaged or do not match, ConfigError for an unknown
    option.
    """
    _check_option("formats", formats, get_args(Formats))
    _check_option("engram", engram, get_args(EngramPlace))
    _check_option("dtype", dtype, get_args(FloatType))
    checkpoint = open_checkpoint(path)
    if tokenizer_sha256 is not None:
        checkpoint.check_tokenizer(tokenizer_sha256)
    matched = match(checkpoint, config, drafter=drafter)
    if formats == "packed" and matched.spelling == "dequantized":
        raise CheckpointError(
            f"{checkpoint.path} is dequantized, and packed formats were asked for.",
            "It has no scales, and choosing new ones could round the weights.",
            "Load it with formats=dequantized, or export it in the release formats.",
        )
    mapped = {n for n, s in matched.specs.items() if s.kind == "engram_table" and engram == "mmap"}
    _check_numbers(checkpoint, matched, skip=mapped)
    root = tree_digest(checkpoint, workers=workers, progress=progress) if digest else None

    specs: dict[str, TensorSpec | None] = {}
    tables: dict[int, EngramTable] = {}
    for name, spec in matched.specs.items():
        if spec.kind == "engram_table" and engram != "device":
            layer = int(name.split(".")[1])
            tables[layer] = _table(checkpoint, name, in_memory=engram == "host", dtype=dtype)
        else:
            specs[name] = spec
            if formats == "packed" and spec.kind != "plain":
                specs[scale_name(name)] = None
    checkpoint.check_unchanged()
    tensors = Weights(checkpoint, specs, matched.spelling, formats, _FLOAT[dtype])
    return Loaded(
        tensors, tables, matched.spelling, formats, matched.drafter, root, matched.ignored
    )


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
