"""One safetensors file: its checked header, its memory map, and writing one."""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing

TOKENIZER_KEY = "tokenizer_sha256"  # in a file's metadata: of the tokenizer.json it belongs to

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the format's own limit, in bytes
_ALIGNMENT = 8


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        name: as the release spells it, without a "model." prefix.
        dtype: the safetensors name of its type, a key of `DTYPES`.
        shape: row-major.
        file: index into `Checkpoint.files`.
        start: first byte, from the beginning of the file.
        nbytes: length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class MappedFile:
    """One safetensors file whose header was checked.

    Attributes:
        map: the file's bytes, read-only.
        stat: (size in bytes, modification time in ns).
        tensors: by name.
        metadata: the header's own texts.
    """

    map: mmap.mmap
    stat: tuple[int, int]
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def map_file(path: Path, index: int) -> MappedFile:
    """Check the header of `path` and map the file into memory.

    `index` is written into each `StoredTensor.file`. Raises CheckpointError unless the tensors
    fill the file exactly, in known types, without gap, overlap or missing byte.
    """
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        size = stat.st_size
        if size < 8:
            raise _truncated(path, size, 8)
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER:
            raise _damaged(path, f"its header claims {length:,} bytes, the limit is 100,000,000")
        if size < 8 + length:
            raise _truncated(path, size, 8 + length)
        header = _parse_header(path, file.read(length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise _damaged(path, "its __metadata__ is not a table of texts")
        tensors = _place(path, header, index, 8 + length, size)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return MappedFile(mapped, (size, stat.st_mtime_ns), tensors, metadata)


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to one safetensors file, under a temporary name that is then renamed.

    Tensors are laid out widest type first, then by name, so that each is aligned to its type;
    equal input gives equal bytes. Raises CheckpointError for a type the format has no name for.
    """
    path = Path(path)
    unknown = sorted(f"{k} ({v.dtype})" for k, v in tensors.items() if v.dtype not in _NAME_OF)
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have a type that cannot be stored: {', '.join(unknown)}.",
            f"A safetensors file knows {', '.join(DTYPES)}.",
            "Convert them before writing.",
        )
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        array = tensors[name]
        header[name] = {
            "dtype": _NAME_OF[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with replacing(path) as temporary, temporary.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            out.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
        out.flush()
        os.fsync(out.fileno())


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not a sound safetensors file: {what}.",
        "Its header decides where every weight lies, so nothing of it can be trusted.",
        "Download or export the file again.",
    )


def _truncated(path: Path, size: int, needed: int) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated: it has {size:,} bytes, its header needs {needed:,}.",
        "A download or copy stopped early.",
        "Download or copy the file again.",
    )


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise _damaged(path, f"its header repeats {', '.join(twice)}")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except ValueError as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header


def _place(
    path: Path, header: dict[str, Any], index: int, data: int, size: int
) -> dict[str, StoredTensor]:
    """Every tensor of `header`; together they must fill the file's bytes from `data` exactly."""
    tensors = []
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            raise _damaged(path, f"the entry of {name} lacks dtype, shape or offsets") from None
        if dtype not in DTYPES:
            raise _damaged(path, f"{name} has the unknown type {dtype!r}")
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise _damaged(path, f"{name} has shape {shape} and offsets {begin}, {end}")
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != nbytes:
            raise _damaged(
                path, f"{name} is {dtype} {list(shape)}, {nbytes:,} bytes, but has {end - begin:,}"
            )
        tensors.append(StoredTensor(name, dtype, shape, index, data + begin, nbytes))
    tensors.sort(key=lambda t: (t.start, t.nbytes))
    at = data
    for tensor in tensors:
        if tensor.start != at:
            kind = "a gap" if tensor.start > at else "an overlap"
            raise _damaged(
                path, f"{kind} of {abs(tensor.start - at):,} bytes lies before {tensor.name}"
            )
        at += tensor.nbytes
    if at > size:
        raise _truncated(path, size, at)
    if at < size:
        raise _damaged(path, f"{size - at:,} bytes follow the last tensor")
    return {tensor.name: tensor for tensor in tensors}
