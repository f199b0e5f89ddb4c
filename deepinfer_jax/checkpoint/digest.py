"""The digest of a checkpoint's weights: one SHA-256 tree over the stored bytes.

It depends on names, types, shapes and bytes only, so not on how the weights are cut into shards,
on a "model." prefix, on file metadata, or on how they will be loaded.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from deepinfer_jax.checkpoint.safetensors import StoredTensor
from deepinfer_jax.checkpoint.shards import Checkpoint
from deepinfer_jax.files import replacing

BLOCK_BYTES = 4 << 20
CACHE_NAME = ".deepinfer-digest.json"
CACHE_FROM_BYTES = 64 << 20  # a smaller checkpoint is hashed sooner than a cache file is worth it

_DEFINITION = 1  # a change of the tree below is a new number
_BLOCKS_AT_ONCE = 1024

Progress = Callable[[str, int, int], None]
"""Called as progress(phase, done_bytes, total_bytes), from the calling thread."""


def tree_digest(
    checkpoint: Checkpoint,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    cache_from_bytes: int = CACHE_FROM_BYTES,
) -> str:
    """The digest, 64 hexadecimal digits.

    Leaf: SHA-256 of each 4 MiB block of a tensor's row-major bytes (the last block may be
    shorter; an empty tensor has none). Tensor: SHA-256 of its leaves one after the other, then
    the JSON text `["name","dtype",[shape]]` without spaces, in UTF-8, the type as safetensors
    names it. Root: SHA-256 of the tensor digests in the order of their names (by code point).

    `workers` threads hash blocks (default: one per core). A checkpoint of `cache_from_bytes` or
    more is looked up in, and written to, `.deepinfer-digest.json` in its folder; an entry holds
    while every file's size and modification time (ns) are the same, and a folder that cannot be
    written is simply not cached. Raises CheckpointError if a file changes meanwhile.
    """
    tensors = [checkpoint.tensors[name] for name in sorted(checkpoint.tensors)]
    total = sum(tensor.nbytes for tensor in tensors)
    use_cache = total >= cache_from_bytes
    if use_cache and (known := _read_cache(checkpoint)) is not None:
        return known
    leaves: dict[str, list[bytes]] = {tensor.name: [] for tensor in tensors}
    done = 0
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for batch in itertools.batched(_blocks(checkpoint, tensors), _BLOCKS_AT_ONCE):
            digests = pool.map(lambda block: hashlib.sha256(block[1]).digest(), batch)
            for (name, block), digest in zip(batch, digests, strict=True):
                leaves[name].append(digest)
                done += block.nbytes
                if progress is not None:
                    progress("digest", done, total)
    root = hashlib.sha256()
    for tensor in tensors:
        node = hashlib.sha256(b"".join(leaves[tensor.name]))
        described = [tensor.name, tensor.dtype, list(tensor.shape)]
        node.update(json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode())
        root.update(node.digest())
    checkpoint.check_unchanged()
    if use_cache:
        _write_cache(checkpoint, root.hexdigest())
    return root.hexdigest()


def _blocks(
    checkpoint: Checkpoint, tensors: list[StoredTensor]
) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in tensors:
        raw = checkpoint.raw(tensor.name)
        for begin in range(0, tensor.nbytes, BLOCK_BYTES):
            yield tensor.name, raw[begin : begin + BLOCK_BYTES]


def _cache_path(checkpoint: Checkpoint) -> Path:
    path = checkpoint.path
    return (path if path.is_dir() else path.parent) / CACHE_NAME


def _key(checkpoint: Checkpoint) -> dict[str, list[int]]:
    pairs = zip(checkpoint.files, checkpoint.stats, strict=True)
    return {path.name: list(stat) for path, stat in pairs}


def _read_cache(checkpoint: Checkpoint) -> str | None:
    try:
        entry = json.loads(_cache_path(checkpoint).read_text())
        fresh = entry["definition"] == _DEFINITION and entry["files"] == _key(checkpoint)
        return str(entry["digest"]) if fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no usable entry: the digest is computed, which is always right


def _write_cache(checkpoint: Checkpoint, digest: str) -> None:
    entry = {"definition": _DEFINITION, "files": _key(checkpoint), "digest": digest}
    path = _cache_path(checkpoint)
    try:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(entry, indent=1))
    except OSError:
        return  # a read-only folder costs time at the next load, nothing else
