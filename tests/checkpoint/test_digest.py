import hashlib
import json
import os

import numpy as np
import pytest

from deepinfer_jax.checkpoint import digest as digest_module
from deepinfer_jax.checkpoint.digest import BLOCK_BYTES, CACHE_NAME, tree_digest
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import CheckpointError


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "big": rng.integers(0, 256, 2 * BLOCK_BYTES + 5, np.uint8),
        "b": rng.standard_normal((3, 2)).astype(np.float32),
        "none": np.empty((0, 7), np.int8),
    }


def digest_of(folder, tensors, **options):
    write_safetensors(folder / "model.safetensors", tensors)
    return tree_digest(open_checkpoint(folder), **options)


def slow(tensors):
    """The definition, with no block shared."""
    names = {"uint8": "U8", "float32": "F32", "int8": "I8"}
    root = b""
    for name in sorted(tensors):
        raw, node = tensors[name].tobytes(), b""
        for begin in range(0, len(raw), 4 * 1024 * 1024):
            node += hashlib.sha256(raw[begin : begin + 4 * 1024 * 1024]).digest()
        shape = ",".join(map(str, tensors[name].shape))
        node += f'["{name}","{names[tensors[name].dtype.name]}",[{shape}]]'.encode()
        root += hashlib.sha256(node).digest()
    return hashlib.sha256(root).hexdigest()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_digest_follows_its_definition(tmp_path, tensors, workers):
    assert digest_of(tmp_path, tensors, workers=workers) == slow(tensors)


def test_the_golden_digest_stands(release_file):
    wanted = "8c08d6a36b0a25a69b1635fb6bc6bf8b923a22a8657cdc0c82d04669f3caac1e"
    assert tree_digest(open_checkpoint(release_file)) == wanted


def test_any_change_changes_the_digest(tmp_path, tensors):
    changed = [
        tensors,
        tensors | {"b": tensors["b"].reshape(2, 3)},
        tensors | {"b": tensors["b"].view(np.int32)},
        {("c" if n == "b" else n): x for n, x in tensors.items()},
        {n: x for n, x in tensors.items() if n != "none"},
    ]
    flipped = tensors["big"].copy()
    flipped[-1] ^= 1
    changed.append(tensors | {"big": flipped})
    assert len({digest_of(tmp_path, t) for t in changed}) == len(changed)


def counting(monkeypatch):
    hashed = []
    true = hashlib.sha256
    monkeypatch.setattr(digest_module.hashlib, "sha256", lambda *a: (hashed.append(1), true(*a))[1])
    return hashed


def test_a_known_digest_is_not_computed_again(tmp_path, tensors, monkeypatch):
    first = digest_of(tmp_path, tensors, cache_from_bytes=0)
    hashed = counting(monkeypatch)
    assert tree_digest(open_checkpoint(tmp_path), cache_from_bytes=0) == first
    assert not hashed


def test_a_rewritten_file_is_hashed_again(tmp_path, tensors):
    first = digest_of(tmp_path, tensors, cache_from_bytes=0)
    file = tmp_path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    before = file.stat().st_mtime_ns
    file.write_bytes(raw)
    os.utime(file, ns=(before + 1, before + 1))
    second = tree_digest(open_checkpoint(tmp_path), cache_from_bytes=0)
    assert second != first
    assert tree_digest(open_checkpoint(tmp_path), cache_from_bytes=1 << 60) == second


@pytest.mark.parametrize("text", ["", "[]", '{"definition": 1}', '{"definition": 0}'])
def test_an_unreadable_cache_entry_is_replaced(tmp_path, tensors, text):
    (tmp_path / CACHE_NAME).write_text(text)
    first = digest_of(tmp_path, tensors, cache_from_bytes=0)
    assert first == slow(tensors)
    assert json.loads((tmp_path / CACHE_NAME).read_text())["digest"] == first


def test_a_small_checkpoint_leaves_no_cache_file(tmp_path, tensors):
    digest_of(tmp_path, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_folder_that_cannot_be_written_is_not_cached(tmp_path, tensors, monkeypatch):
    def refuse(**_):
        raise PermissionError("read-only")

    write_safetensors(tmp_path / "model.safetensors", tensors)
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert tree_digest(open_checkpoint(tmp_path), cache_from_bytes=0) == slow(tensors)
    assert not (tmp_path / CACHE_NAME).exists()


def test_a_cache_entry_that_cannot_be_renamed_leaves_no_file(tmp_path, tensors, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    write_safetensors(tmp_path / "model.safetensors", tensors)
    monkeypatch.setattr("os.replace", refuse)
    assert tree_digest(open_checkpoint(tmp_path), cache_from_bytes=0) == slow(tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_replaced_while_it_is_hashed_is_refused(tmp_path, tensors):
    write_safetensors(tmp_path / "model.safetensors", tensors)
    opened = open_checkpoint(tmp_path)

    def replace(*_):
        write_safetensors(tmp_path / "model.safetensors", {"x": np.zeros(3, np.int8)})

    with pytest.raises(CheckpointError, match="changed while it was read"):
        tree_digest(opened, progress=replace, cache_from_bytes=0)
    assert not (tmp_path / CACHE_NAME).exists()
