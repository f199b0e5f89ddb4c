"""A whole checkpoint: one safetensors file, or shards with their index, opened together.

Opening reads headers only, and nothing but a complete, consistent set of files opens.
"""

import dataclasses
import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.safetensors import (
    DTYPES,
    TOKENIZER_KEY,
    StoredTensor,
    map_file,
)
from deepinfer_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; arrays are read-only views of memory-mapped files.

    Attributes:
        path: the folder or file that was opened.
        files: the safetensors files, in name order.
        stats: (size in bytes, modification time in ns) of each file when it was opened.
        tensors: every tensor by name.
        metadata: of each file, its header's own texts.
    """

    path: Path
    files: tuple[Path, ...]
    stats: tuple[tuple[int, int], ...]
    tensors: Mapping[str, StoredTensor]
    metadata: tuple[Mapping[str, str], ...]
    _maps: tuple[mmap.mmap, ...] = field(repr=False)

    def array(self, name: str) -> np.ndarray:
        """The tensor as a read-only array of its own type; its bytes are read when touched."""
        tensor = self.tensors[name]
        flat = np.frombuffer(
            self._maps[tensor.file],
            DTYPES[tensor.dtype],
            count=math.prod(tensor.shape),
            offset=tensor.start,
        )
        return flat.reshape(tensor.shape)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's row-major bytes, uint8 [nbytes], read-only."""
        tensor = self.tensors[name]
        return np.frombuffer(self._maps[tensor.file], np.uint8, tensor.nbytes, tensor.start)

    def expect_random_reads(self, name: str) -> None:
        """Tell the operating system not to read ahead around this tensor's rows."""
        tensor = self.tensors[name]
        if hasattr(mmap, "MADV_RANDOM") and tensor.nbytes:
            begin = tensor.start - tensor.start % mmap.PAGESIZE
            length = tensor.start + tensor.nbytes - begin
            self._maps[tensor.file].madvise(mmap.MADV_RANDOM, begin, length)

    def check_tokenizer(self, sha256: str) -> None:
        """Raise CheckpointError if the weights name another tokenizer.json than that of `sha256`.

        Files name theirs in the metadata `tokenizer_sha256`, or do not: the release names none.
        """
        for path, metadata in zip(self.files, self.metadata, strict=True):
            wanted = metadata.get(TOKENIZER_KEY, sha256)
            if wanted != sha256:
                raise CheckpointError(
                    f"{path} belongs to the tokenizer.json of SHA-256 {wanted}, and the tokenizer "
                    f"here has {sha256}.",
                    "With another tokenizer every token id would mean something else.",
                    "Use the tokenizer.json that came with these weights.",
                )

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced or rewritten since it was opened."""
        for path, before in zip(self.files, self.stats, strict=True):
            after = _stat_of(path)
            if after != before:
                raise CheckpointError(
                    f"{path} changed while it was read: (bytes, mtime ns) {before} became {after}.",
                    "What was read may mix two versions of the weights.",
                    "Wait until the writer is done and load again.",
                )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder (one safetensors file, or shards with their index), or one file.

    Headers are read and checked; tensor bytes are not. A "model." prefix is taken off when every
    name has it. Raises CheckpointError for anything missing, damaged or ambiguous.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"There is no checkpoint at {path}.",
            "The path does not exist.",
            "Check the path, or set DEEPINFER_HF_MODEL_DIR to a complete model folder.",
        )
    weight_map = None
    if path.is_file():
        files: Sequence[Path] = (path,)
    elif (path / INDEX_NAME).exists():
        weight_map = _read_index(path / INDEX_NAME)
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} of {len(files)} shards: {', '.join(missing)}.",
                f"{INDEX_NAME} names them.",
                "Finish the download, or copy the missing files.",
            )
    else:
        files = sorted(p for p in path.glob(f"*{SUFFIX}") if not p.name.startswith("."))
        if not files:
            raise CheckpointError(
                f"{path} holds no {SUFFIX} file.",
                "A model folder holds its weights beside config.json.",
                "Check the path, or finish the download.",
            )
        if len(files) > 1:
            raise CheckpointError(
                f"{path} holds {len(files)} {SUFFIX} files and no {INDEX_NAME}: "
                f"{', '.join(p.name for p in files)}.",
                "Without the index nothing says which files belong together or if one is missing.",
                f"Add {INDEX_NAME}, or keep one file in the folder.",
            )
    tensors: dict[str, StoredTensor] = {}
    mapped = []
    for index, file in enumerate(files):
        one = map_file(file, index)
        twice = sorted(set(one.tensors) & set(tensors))
        if twice:
            raise CheckpointError(
                f"{len(twice)} tensors are stored twice: {', '.join(twice)}.",
                f"{file.name} repeats names of an earlier shard, and either copy could be right.",
                "Export the checkpoint again.",
            )
        tensors |= one.tensors
        mapped.append(one)
    if weight_map is not None:
        _check_index(path / INDEX_NAME, weight_map, tensors, files)
    return Checkpoint(
        path=path,
        files=tuple(files),
        stats=tuple(one.stat for one in mapped),
        tensors=_strip_prefix(path, tensors),
        metadata=tuple(one.metadata for one in mapped),
        _maps=tuple(one.map for one in mapped),
    )


def _stat_of(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        sound = bool(weight_map) and all(
            isinstance(file, str) and file.endswith(SUFFIX) and Path(file).name == file
            for file in weight_map.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        sound, weight_map = False, {}
    if not sound:
        raise CheckpointError(
            f"{path} is not a sound index.",
            "It must be JSON with a weight_map from tensor names to file names in its own folder.",
            "Download or export the checkpoint again.",
        )
    return weight_map


def _check_index(
    path: Path,
    weight_map: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    files: Sequence[Path],
) -> None:
    """Index and headers must name the same tensors in the same files."""
    wrong = [
        f"{name} (index: {weight_map.get(name, 'none')}, "
        f"headers: {files[tensors[name].file].name if name in tensors else 'none'})"
        for name in sorted(set(weight_map) | set(tensors))
        if name not in tensors or weight_map.get(name) != files[tensors[name].file].name
    ]
    if wrong:
        raise CheckpointError(
            f"{path} and the shards disagree about {len(wrong)} tensors: {', '.join(wrong)}.",
            "Index and shards come from different exports, or a shard was replaced.",
            "Download or export the checkpoint again.",
        )


def _strip_prefix(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    prefix = "model."
    with_prefix = [name for name in tensors if name.startswith(prefix)]
    if not with_prefix:
        return dict(tensors)
    if len(with_prefix) != len(tensors):
        few = with_prefix if 2 * len(with_prefix) <= len(tensors) else set(tensors) - {*with_prefix}
        raise CheckpointError(
            f"{path} has {len(with_prefix)} names with the prefix 'model.' and "
            f"{len(tensors) - len(with_prefix)} without; the fewer are {', '.join(sorted(few))}.",
            "A mixture is two exports in one folder.",
            "Export the checkpoint again, with the prefix on every name or on none.",
        )
    return {
        name.removeprefix(prefix): dataclasses.replace(tensor, name=name.removeprefix(prefix))
        for name, tensor in tensors.items()
    }
