import json
import struct

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint.safetensors import DTYPES, map_file, write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.errors import CheckpointError


def write_raw(path, header, data, *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        map_file(path, 0)
    assert str(path) in caught.value.what and caught.value.why and caught.value.do
    return caught.value.what


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_comes_back_bit_for_bit(tmp_path, name):
    count = 6 * DTYPES[name].itemsize
    raw = np.random.default_rng(0).integers(0, 2 if name == "BOOL" else 256, count, np.uint8)
    written = {
        "matrix": raw.view(DTYPES[name]).reshape(2, 3),
        "scalar": raw.view(DTYPES[name])[0].reshape(()),
        "empty": np.empty((0, 4), DTYPES[name]),
    }
    write_safetensors(tmp_path / "a.safetensors", written)
    read = open_checkpoint(tmp_path)
    assert set(read.tensors) == set(written)
    for key, array in written.items():
        assert read.array(key).dtype == array.dtype
        assert read.array(key).shape == array.shape
        assert read.array(key).tobytes() == array.tobytes()
        assert read.raw(key).tobytes() == array.tobytes()


def test_a_transposed_array_is_written_row_major(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3).T
    write_safetensors(tmp_path / "a.safetensors", {"x": x})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).array("x"), x)


def test_what_is_read_cannot_be_written(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="read-only"):
        open_checkpoint(tmp_path).array("x")[0] = 1


def test_data_need_not_be_aligned(tmp_path):
    x, y = np.array([7], np.int8), np.array([1.5, -2.5], ml_dtypes.bfloat16)
    header = {"x": entry("I8", [1], 0, 1), "y": entry("BF16", [2], 1, 5)}
    path = write_raw(tmp_path / "a.safetensors", header, x.tobytes() + y.tobytes())
    np.testing.assert_array_equal(open_checkpoint(path).array("y").astype(np.float32), [1.5, -2.5])


def test_equal_input_gives_equal_bytes_and_aligned_tensors(tmp_path):
    a = {"x": np.ones(3, np.int8), "y": np.ones((2, 2), np.float32)}
    write_safetensors(tmp_path / "1", a, metadata={"format": "release"})
    write_safetensors(tmp_path / "2", dict(reversed(a.items())), metadata={"format": "release"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    for tensor in map_file(tmp_path / "1", 0).tensors.values():
        assert tensor.start % DTYPES[tensor.dtype].itemsize == 0


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.zeros(3, np.float32)})
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, {"x": np.ones(9, np.float32)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_type_without_a_name_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"1 tensors have a type .*: x \(complex64\)\."):
        write_safetensors(tmp_path / "a", {"x": np.zeros(2, np.complex64)})


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.zeros(1000, np.float32)})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1234])
    what = refusal(path)
    assert f"truncated: it has {len(whole) - 1234:,} bytes, its header needs {len(whole):,}" in what


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_a_file_cut_inside_its_header_is_truncated(tmp_path, size):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": np.zeros(10, np.float32)})
    path.write_bytes(path.read_bytes()[:size])
    assert f"truncated: it has {size} bytes" in refusal(path)


@pytest.mark.parametrize(
    ("header", "size", "said"),
    [
        ({"x": entry("F32", [2], 0, 8), "y": entry("F32", [1], 4, 8)}, 8, "an overlap of 4 bytes"),
        ({"x": entry("F32", [1], 0, 4), "y": entry("F32", [1], 8, 12)}, 12, "a gap of 4 bytes"),
        ({"x": entry("F32", [1], 4, 8)}, 8, "a gap of 4 bytes lies before x"),
        ({"x": entry("F32", [1], 0, 4)}, 7, "3 bytes follow the last tensor"),
        ({"x": entry("F32", [3], 0, 8)}, 8, "x is F32 [3], 12 bytes, but has 8"),
        ({"x": entry("F9", [3], 0, 8)}, 8, "x has the unknown type 'F9'"),
        ({"x": entry("F32", [-1], 0, -4)}, 8, "x has shape (-1,)"),
        ({"x": entry("F32", [1.0], 0, 4)}, 4, "x has shape (1.0,)"),
        ({"x": {"dtype": "F32", "shape": [1]}}, 4, "the entry of x lacks dtype, shape or offsets"),
        ({"x": 3}, 4, "the entry of x lacks dtype, shape or offsets"),
        ({"__metadata__": {"format": 1}}, 0, "its __metadata__ is not a table of texts"),
        ({"__metadata__": []}, 0, "its __metadata__ is not a table of texts"),
        (b"[1]", 0, "not a JSON object"),
        (b"{", 0, "its header is not JSON"),
        (b"\xff\xfe", 0, "its header is not JSON"),
        (b'{"x":{},"x":{}}', 0, "its header repeats x"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, header, size, said):
    assert said in refusal(write_raw(tmp_path / "a.safetensors", header, bytes(size)))


def test_an_absurd_header_length_is_refused(tmp_path):
    path = write_raw(tmp_path / "a.safetensors", b"{}", b"", length=1 << 60)
    assert "its header claims 1,152,921,504,606,846,976 bytes" in refusal(path)
