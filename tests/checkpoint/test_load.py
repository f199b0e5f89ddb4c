import json

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import INDEX_NAME, Checkpoint, open_checkpoint
from deepinfer_jax.errors import CheckpointError, ConfigError

BF16 = np.dtype(ml_dtypes.bfloat16)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def loaded(release_file, config):
    return load(release_file, config)


def write(folder, tensors):
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def slow(weights, scales, kind, row, column):
    """One weight, computed from its bits."""
    factor = 2.0 ** (int(scales.view(np.uint8)[row // (32 if kind == "q8" else 1), column // 32])
                     - 127)  # fmt: skip
    if kind == "q4":
        nibble = int(weights.view(np.uint8)[row, column // 2]) >> 4 * (column % 2) & 15
        return (-1 if nibble & 8 else 1) * E2M1[nibble & 7] * factor
    code = int(weights.view(np.uint8)[row, column])
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return (-size if code & 0x80 else size) * factor


def test_every_weight_is_decoded_exactly(loaded, release_tensors, config):
    rng = np.random.default_rng(0)
    specs = inventory(config, drafter=True)
    assert set(loaded.tensors) == set(specs)
    for name, spec in specs.items():
        got, stored = loaded.tensors[name], release_tensors[name]
        if spec.kind == "plain":
            assert same(got, stored), name
            continue
        assert got.dtype == BF16 and got.shape == spec.shape
        scales = release_tensors[name.removesuffix("weight") + "scale"]
        for _ in range(8):
            row, column = rng.integers(spec.shape[0]), rng.integers(spec.shape[1])
            value = slow(stored, scales, spec.kind, int(row), int(column))
            assert float(got[row, column]) == value, (name, row, column)


def test_the_release_file_holds_the_dequantized_file(loaded, golden_dir):
    whole = open_checkpoint(golden_dir / "model.safetensors")
    assert set(whole.tensors) == set(loaded.tensors)
    for name in whole.tensors:
        assert same(whole.array(name), loaded.tensors[name]), name


def test_a_dequantized_export_loads_to_the_same_weights(tmp_path, loaded, config):
    again = load(write(tmp_path, loaded.tensors), config)
    assert again.spelling == "dequantized" and loaded.spelling == "release"
    assert again.digest != loaded.digest
    for name, array in loaded.tensors.items():
        assert same(again.tensors[name], array), name


def test_shards_and_prefix_load_to_the_same_weights(tmp_path, release_tensors, loaded, config):
    names = sorted(release_tensors)
    weight_map = {}
    for k in range(3):
        part = {f"model.{n}": release_tensors[n] for n in names[k::3]}
        write_safetensors(tmp_path / f"model-{k}.safetensors", part)
        weight_map |= dict.fromkeys(part, f"model-{k}.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(tmp_path, config)
    assert sharded.digest == loaded.digest
    for name, array in loaded.tensors.items():
        assert same(sharded.tensors[name], array), name


def test_packed_weights_are_the_stored_bytes(release_file, release_tensors, loaded, config):
    packed = load(release_file, config, formats="packed")
    assert packed.formats == "packed" and packed.digest == loaded.digest
    assert set(packed.tensors) == set(release_tensors)
    for name, array in packed.tensors.items():
        assert array.tobytes() == release_tensors[name].tobytes(), name
    expert = "layers.0.ffn.experts.0.w1"
    assert packed.tensors[f"{expert}.weight"].dtype == np.uint8
    assert packed.tensors[f"{expert}.scale"].dtype == ml_dtypes.float8_e8m0fnu


def test_float32_widens_everything_and_changes_nothing(release_file, loaded, config):
    wide = load(release_file, config, dtype="float32")
    for name, array in wide.tensors.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, loaded.tensors[name].astype(np.float32))


def test_loaded_arrays_cannot_be_written(loaded):
    for name in ("norm.weight", "layers.0.attn.wkv.weight"):
        with pytest.raises(ValueError, match="read-only"):
            loaded.tensors[name][0] = 0


def test_the_drafter_can_be_left_out(release_file, loaded, config):
    plain = load(release_file, config, drafter=False)
    assert loaded.drafter and not plain.drafter
    assert set(plain.tensors) == {n for n in loaded.tensors if not n.startswith("mtp.")}


@pytest.mark.parametrize("place", ["host", "mmap"])
@pytest.mark.parametrize("formats", ["dequantized", "packed"])
def test_an_engram_table_outside_the_device_gives_the_same_rows(
    release_file, loaded, config, place, formats
):
    apart = load(release_file, config, engram=place, formats=formats)
    assert sorted(apart.engram) == [1, 4]
    for layer, table in apart.engram.items():
        name = f"layers.{layer}.engram.embed.weight"
        assert name not in apart.tensors
        whole = loaded.tensors[name]
        assert table.shape == whole.shape
        indices = np.random.default_rng(layer).integers(0, len(whole), (5, 6))
        assert same(table.rows(indices), whole[indices])


def test_a_dequantized_table_is_read_by_rows_too(tmp_path, loaded, config):
    folder = write(tmp_path, loaded.tensors)
    table = load(folder, config, engram="mmap", dtype="float32").engram[1]
    whole = loaded.tensors["layers.1.engram.embed.weight"].astype(np.float32)
    assert table.scales is None
    np.testing.assert_array_equal(table.rows(np.array([3, 629, 3])), whole[[3, 629, 3]])


def test_a_weight_is_decoded_when_it_is_looked_up_and_no_other(release_file, config, monkeypatch):
    plain = load(release_file, config, drafter=False)
    read = []
    array = Checkpoint.array
    monkeypatch.setattr(Checkpoint, "array", lambda self, n: read.append(n) or array(self, n))
    assert len(plain.tensors) == len(inventory(config, drafter=False)) and not read
    assert plain.tensors["layers.0.attn.wkv.weight"].dtype == BF16
    assert read == ["layers.0.attn.wkv.weight", "layers.0.attn.wkv.scale"]
    for name in ("mtp.0.attn.wkv.weight", "layers.0.attn.wkv.scale"):
        with pytest.raises(KeyError):
            plain.tensors[name]


def test_a_bad_tensor_is_found_before_any_tensor_is_read(
    tmp_path, release_tensors, config, monkeypatch
):
    del release_tensors["norm.weight"]
    write(tmp_path, release_tensors)
    monkeypatch.setattr(Checkpoint, "array", None)
    with pytest.raises(CheckpointError, match=r"1 missing: norm\.weight"):
        load(tmp_path, config)


def spoiled(tensors, name, value):
    array = tensors[name].copy()
    array.view(np.uint8)[3, 0] = value
    return tensors | {name: array}


@pytest.mark.parametrize("formats", ["dequantized", "packed"])
@pytest.mark.parametrize(
    "name", ["layers.2.attn.wq_b.scale", "mtp.1.ffn.experts.5.w2.scale",
             "layers.4.engram.embed.scale"],
)  # fmt: skip
def test_scale_255_is_refused_at_load(tmp_path, release_tensors, config, formats, name):
    write(tmp_path, spoiled(release_tensors, name, 255))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, config, formats=formats)
    assert caught.value.what == f"{name} holds 1 scales of code 255, the first at [3, 0]."


def test_a_nan_code_is_refused_even_when_it_stays_packed(tmp_path, release_tensors, config):
    write(tmp_path, spoiled(release_tensors, "layers.2.attn.wq_b.weight", 0x7F))
    with pytest.raises(CheckpointError, match=r"wq_b\.weight holds an E4M3 code .* at \[3, 0\]"):
        load(tmp_path, config, formats="packed")


def test_a_mapped_table_refuses_scale_255_when_the_row_is_read(tmp_path, release_tensors, config):
    write(tmp_path, spoiled(release_tensors, "layers.4.engram.embed.scale", 255))
    table = load(tmp_path, config, engram="mmap").engram[4]
    assert table.rows(np.array([2, 4])).shape == (2, 32)
    with pytest.raises(CheckpointError, match=r"engram\.embed\.scale .* the first at \[3, 0\]"):
        table.rows(np.array([2, 3]))


@pytest.mark.parametrize("row", [-1, 630])
def test_a_row_outside_the_table_is_refused(release_file, config, row):
    table = load(release_file, config, engram="mmap", digest=False).engram[1]
    with pytest.raises(CheckpointError, match=f"Row {row} of .* it has rows 0 to 629"):
        table.rows(np.array([0, row]))
    with pytest.raises(CheckpointError, match="asked for by float64 indices"):
        table.rows(np.array([0.0]))


def test_packed_formats_of_a_dequantized_checkpoint_are_refused(tmp_path, loaded, config):
    write(tmp_path, loaded.tensors)
    with pytest.raises(CheckpointError, match="is dequantized, and packed formats were asked"):
        load(tmp_path, config, formats="packed")


@pytest.mark.parametrize(
    "option", [{"formats": "fp4"}, {"engram": "disk"}, {"dtype": "float16"}], ids=str
)
def test_an_unknown_option_is_refused(release_file, config, option):
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name} is '{value}'. It is one of "):
        load(release_file, config, **option)


def test_progress_of_the_digest_reaches_its_total(release_file, config):
    calls = []
    load(release_file, config, progress=lambda *call: calls.append(call))
    done = [d for _, d, _ in calls]
    assert {(p, t) for p, _, t in calls} == {("digest", release_file_bytes(release_file))}
    assert done == sorted(done) and done[-1] == release_file_bytes(release_file)


def release_file_bytes(path):
    return sum(t.nbytes for t in open_checkpoint(path).tensors.values())


def test_the_digest_can_be_left_out(release_file, config):
    assert load(release_file, config, digest=False).digest is None
