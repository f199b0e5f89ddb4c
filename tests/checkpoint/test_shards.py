import json

import numpy as np
import pytest

from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import INDEX_NAME, open_checkpoint
from deepinfer_jax.errors import CheckpointError

A, B = "model-1.safetensors", "model-2.safetensors"


def shard(folder, parts, weight_map=None):
    """Write {file: {name: array}} and an index (the true one unless given)."""
    for file, tensors in parts.items():
        write_safetensors(folder / file, tensors)
    true = {name: file for file, tensors in parts.items() for name in tensors}
    index = {"metadata": {}, "weight_map": true if weight_map is None else weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def ones(*names):
    return {name: np.full(2, len(name), np.float32) for name in names}


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.why and caught.value.do
    return caught.value.what


def test_shards_open_as_one_checkpoint(tmp_path):
    shard(tmp_path, {A: ones("x"), B: ones("yy", "zzz")})
    opened = open_checkpoint(tmp_path)
    assert {n: float(opened.array(n)[0]) for n in opened.tensors} == {"x": 1, "yy": 2, "zzz": 3}
    assert [f.name for f in opened.files] == [A, B]


def test_a_missing_path_is_refused(tmp_path):
    assert refusal(tmp_path / "no") == f"There is no checkpoint at {tmp_path / 'no'}."


def test_a_folder_without_weights_is_refused(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} holds no .safetensors file."


def test_shards_without_an_index_are_refused(tmp_path):
    shard(tmp_path, {A: ones("x"), B: ones("y")})
    (tmp_path / INDEX_NAME).unlink()
    assert f"holds 2 .safetensors files and no {INDEX_NAME}: {A}, {B}" in refusal(tmp_path)


def test_an_unfinished_temporary_file_is_not_a_shard(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", ones("x"))
    (tmp_path / ".model.safetensors.1.tmp").write_bytes(b"half")
    assert list(open_checkpoint(tmp_path).tensors) == ["x"]


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path, {A: ones("x"), B: ones("y")})
    (tmp_path / B).unlink()
    assert f"lacks 1 of 2 shards: {B}" in refusal(tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    shard(tmp_path, {A: ones("x"), B: ones("y")})
    (tmp_path / B).write_bytes((tmp_path / B).read_bytes()[:-1])
    assert f"{tmp_path / B} is truncated" in refusal(tmp_path)


def test_index_and_headers_must_agree(tmp_path):
    shard(tmp_path, {A: ones("x", "extra"), B: ones("y")}, {"x": A, "y": A, "lost": B})
    said = refusal(tmp_path)
    assert "disagree about 3 tensors" in said
    assert f"extra (index: none, headers: {A})" in said
    assert f"lost (index: {B}, headers: none)" in said
    assert f"y (index: {A}, headers: {B})" in said


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shard(tmp_path, {A: ones("x", "y"), B: ones("y")})
    assert "1 tensors are stored twice: y" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"x": "../x.safetensors"}}', "nul"],
)
def test_an_unsound_index_is_refused(tmp_path, text):
    (tmp_path / INDEX_NAME).write_text(text)
    assert refusal(tmp_path) == f"{tmp_path / INDEX_NAME} is not a sound index."


def test_a_prefix_on_every_name_is_taken_off(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", ones("model.x", "model.y"))
    opened = open_checkpoint(tmp_path)
    assert set(opened.tensors) == {"x", "y"}
    assert float(opened.array("x")[0]) == len("model.x")


def test_a_prefix_on_some_names_is_refused(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", ones("model.x", "model.y", "z"))
    said = refusal(tmp_path)
    assert "2 names with the prefix 'model.' and 1 without; the fewer are z" in said


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", ones("x"))
    opened = open_checkpoint(tmp_path)
    opened.check_unchanged()
    write_safetensors(tmp_path / "a.safetensors", ones("x", "y"))
    with pytest.raises(CheckpointError, match="a.safetensors changed while it was read"):
        opened.check_unchanged()
