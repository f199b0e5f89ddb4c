"""The target cache, version 2: what a frozen target says about every token of a set of samples.

A folder of `manifest.json`, `samples.idx` (packed 56-byte records) and `shard-%05d.bin`. A sample's
payload is contiguous: int32 ids [L], uint8 attention mask [L], uint8 loss mask [L], bfloat16 hidden
states of the target layers [L, m d] side by side, bfloat16 hidden state after the target's final
norm [L, d]. All numbers are little-endian (drafting specification, "Target cache format").
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.files import replacing

VERSION = 2
MANIFEST, INDEX = "manifest.json", "samples.idx"
SHARD_BYTES = 64 << 30
_OFFSETS = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "target_hidden_states",
    "target_last_hidden_states",
)
RECORD = np.dtype(
    [("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4")]
    + [(name, "<u8") for name in _OFFSETS]
)
"""One record of `samples.idx`, 56 bytes; the last five are byte offsets in the sample's shard."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_TYPES = {"hidden_dtype": "bfloat16", "token_dtype": "int32", "mask_dtype": "uint8"}
_REQUIRED = (
    *("version", "num_samples", "num_shards", "target_layer_ids", *_TYPES),
    *("index_record_size", "hidden_size", "shards"),
)


@dataclass(frozen=True)
class CachedSample:
    """One sample; read from a cache, its arrays are read-only views of the memory-mapped shard.

    Attributes:
        ids: int32 [L]. attention_mask, loss_mask: uint8 [L].
        hidden: bfloat16 [L, m d], the chosen layers side by side.
        last_hidden: bfloat16 [L, d], after the target's final norm.
    """

    ids: np.ndarray
    attention_mask: np.ndarray
    loss_mask: np.ndarray
    hidden: np.ndarray
    last_hidden: np.ndarray


class TargetCacheWriter:
    """Writes a cache sample by sample; use it as a context manager.

    Shards grow under a hidden folder. When the block ends well they get their names, then the index
    is written, and the manifest last, so that a folder with a manifest is a complete cache. When it
    raises, nothing is left.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        target_layer_ids: Sequence[int],
        hidden_size: int,
        free: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ):
        """Begin a cache.

        Args:
            folder: made if need be; must hold no cache.
            target_layer_ids: ascending, the layers whose hidden states stand side by side.
            hidden_size: d.
            free: further keys of the manifest.
            shard_bytes: a shard that would exceed it is closed first; a sample is never split.

        Raises CheckpointError for a folder that holds a cache, layers that do not ascend, and free
        keys that the format reserves.
        """
        self._folder, self._layers = Path(folder), [int(i) for i in target_layer_ids]
        self._width, self._limit, self._free = hidden_size, shard_bytes, dict(free or {})
        if (self._folder / MANIFEST).exists():
            raise CheckpointError(
                f"{self._folder} already holds a target cache.",
                "A cache is written once; mixing two would pair samples with foreign shards.",
                "Choose another folder, or remove this one first.",
            )
        if not self._layers or self._layers != sorted(set(self._layers)):
            raise CheckpointError(
                f"The target layers {self._layers} do not ascend.",
                "The format stores their hidden states side by side in ascending order.",
                "Pass each layer once, lowest first.",
            )
        if taken := sorted(set(self._free) & set(_REQUIRED)):
            raise CheckpointError(
                f"The manifest keys {', '.join(taken)} were given as free fields.",
                "The format fills them itself.",
                "Give them other names.",
            )
        self._temporary = self._folder / ".writing"
        self._records: list[tuple[int, ...]] = []
        self._sizes: list[int] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._temporary.mkdir(parents=True, exist_ok=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._temporary)

    def add(self, sample: CachedSample) -> None:
        """Append a sample. Raises CheckpointError for arrays of other types or shapes."""
        length = len(sample.ids)
        wide = len(self._layers) * self._width
        expected = {
            "ids": (np.dtype(np.int32), (length,)),
            "attention_mask": (np.dtype(np.uint8), (length,)),
            "loss_mask": (np.dtype(np.uint8), (length,)),
            "hidden": (_BFLOAT16, (length, wide)),
            "last_hidden": (_BFLOAT16, (length, self._width)),
        }
        arrays = []
        for name, (dtype, shape) in expected.items():
            array = getattr(sample, name)
            if array.dtype != dtype or array.shape != shape or not length:
                raise CheckpointError(
                    f"Sample {len(self._records)} has {name} of type {array.dtype} and shape "
                    f"{list(array.shape)}; the cache stores {dtype} {list(shape)}.",
                    "A reader finds the arrays by these sizes alone.",
                    "Convert the sample, and leave empty ones out.",
                )
            stored = array.view(np.uint16) if dtype == _BFLOAT16 else array
            arrays.append(np.ascontiguousarray(stored, stored.dtype.newbyteorder("<")))
        total = sum(a.nbytes for a in arrays)
        if self._file is None or (self._sizes[-1] and self._sizes[-1] + total > self._limit):
            self._roll()
        assert self._file is not None
        offsets, position = [], self._sizes[-1]
        for array in arrays:
            offsets.append(position)
            self._file.write(array.data)
            position += array.nbytes
        self._sizes[-1] = position
        self._records.append((len(self._records), len(self._sizes) - 1, length, *offsets))

    def _roll(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = (self._temporary / _shard_name(len(self._sizes))).open("wb")
        self._sizes.append(0)

    def _finish(self) -> None:
        names = [_shard_name(i) for i in range(len(self._sizes))]
        for name in names:
            (self._temporary / name).replace(self._folder / name)
        with replacing(self._folder / INDEX) as temporary:
            temporary.write_bytes(np.array(self._records, RECORD).tobytes())
        manifest = {
            "version": VERSION,
            "num_samples": len(self._records),
            "num_shards": len(names),
            "target_layer_ids": self._layers,
            **_TYPES,
            "index_record_size": RECORD.itemsize,
            "hidden_size": self._width,
            "shards": [{"shard_id": i, "file_name": name} for i, name in enumerate(names)],
            **self._free,
        }
        with replacing(self._folder / MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=2))


class TargetCache:
    """A complete cache, memory-mapped; `cache[i]` is sample i.

    Attributes:
        manifest: as written. lengths: int64 [samples], tokens of each.
    """

    def __init__(self, folder: str | Path):
        """Open and check a cache; payloads are not read.

        Raises CheckpointError for a missing or unreadable manifest, another version or type, an
        index that is cut or out of order, and records that do not lie inside their shards.
        """
        self._folder = Path(folder)
        self.manifest = _read_manifest(self._folder)
        layers, self._d = self.manifest["target_layer_ids"], self.manifest["hidden_size"]
        self._wide = len(layers) * self._d
        self._records = _read_index(self._folder, self.manifest["num_samples"])
        self.lengths = self._records["seq_len"].astype(np.int64)
        self._shards = [self._map(s["file_name"]) for s in self.manifest["shards"]]
        self._check_records()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> CachedSample:
        record = self._records[index]
        length, shard = int(record["seq_len"]), self._shards[int(record["shard_id"])]

        def view(name: str, dtype: Any, *shape: int) -> np.ndarray:
            return np.ndarray(shape, dtype, buffer=shard, offset=int(record[name]))

        return CachedSample(
            view("input_ids", "<i4", length),
            view("attention_mask", np.uint8, length),
            view("loss_mask", np.uint8, length),
            view("target_hidden_states", "<u2", length, self._wide).view(_BFLOAT16),
            view("target_last_hidden_states", "<u2", length, self._d).view(_BFLOAT16),
        )

    def _map(self, name: str) -> np.ndarray:
        path = self._folder / name
        if not path.is_file() or not path.stat().st_size:
            raise _damaged(path, "the manifest names this shard, and it is missing or empty")
        return np.memmap(path, np.uint8, "r")

    def _check_records(self) -> None:
        records = self._records
        if not np.array_equal(records["sample_id"], np.arange(len(records), dtype=np.uint64)):
            raise _damaged(self._folder / INDEX, "its sample ids are not 0, 1, 2, ...")
        ends = np.array([len(s) for s in self._shards], np.uint64)
        sizes = (4, 1, 1, 2 * self._wide, 2 * self._d)
        if not (records["shard_id"] < len(ends)).all() or not (records["seq_len"] > 0).all():
            raise _damaged(self._folder / INDEX, "it names a shard that is not there, or no tokens")
        place = records["input_ids"].copy()
        contiguous = np.ones(len(records), bool)
        for name, size in zip(_OFFSETS, sizes, strict=True):
            contiguous &= records[name] == place
            place = place + records["seq_len"].astype(np.uint64) * np.uint64(size)
        wrong = np.flatnonzero(~contiguous | (place > ends[records["shard_id"]]))
        if len(wrong):
            first = int(wrong[0])
            shard = int(records["shard_id"][first])
            raise _damaged(
                self._folder / self.manifest["shards"][shard]["file_name"],
                f"{len(wrong)} samples, the first of them {first}, do not lie whole and contiguous "
                f"in its {len(self._shards[shard]):,} bytes",
            )


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.bin"


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} holds no {MANIFEST}.",
            "It is written last, so the folder is no target cache or an unfinished one.",
            "Check the path, or write the cache again.",
        ) from None
    except ValueError:
        raise _damaged(path, "it is no JSON") from None
    missing = [key for key in _REQUIRED if key not in manifest]
    if missing:
        raise _damaged(path, f"it lacks {', '.join(missing)}")
    expected = {"version": VERSION, "index_record_size": RECORD.itemsize, **_TYPES}
    for key, value in expected.items():
        if manifest[key] != value:
            raise CheckpointError(
                f"{path} says {key} {manifest[key]!r}; this reader knows {value!r}.",
                "Its files would be read as something else than what was written.",
                f"Write the cache again in version {VERSION}.",
            )
    ids = [shard["shard_id"] for shard in manifest["shards"]]
    if ids != list(range(manifest["num_shards"])):
        raise _damaged(path, f"its {manifest['num_shards']} shards are numbered {ids}")
    return manifest


def _read_index(folder: Path, samples: int) -> np.ndarray:
    path = folder / INDEX
    stored = path.read_bytes() if path.exists() else b""
    if len(stored) != samples * RECORD.itemsize:
        raise _damaged(
            path, f"{samples} samples need {samples * RECORD.itemsize:,} bytes, it has "
            f"{len(stored):,}"
        )  # fmt: skip
    return np.frombuffer(stored, RECORD)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {what}.",
        "Training on it would pair tokens with the wrong hidden states.",
        "Copy the cache again, or write it anew.",
    )
