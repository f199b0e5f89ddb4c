import json
import struct

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.training.target_cache import (
    RECORD,
    CachedSample,
    TargetCache,
    TargetCacheWriter,
)

D, LAYERS = 4, (1, 2)


def sample(length: int, seed: int = 0) -> CachedSample:
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(length, 3 * D)).astype(ml_dtypes.bfloat16)
    return CachedSample(
        ids=rng.integers(0, 99, length).astype(np.int32),
        attention_mask=np.ones(length, np.uint8),
        loss_mask=(np.arange(length) % 2).astype(np.uint8),
        hidden=wide[:, : 2 * D],
        last_hidden=wide[:, 2 * D :],
    )


def write(folder, samples, **options):
    with TargetCacheWriter(folder, target_layer_ids=LAYERS, hidden_size=D, **options) as writer:
        for one in samples:
            writer.add(one)
    return folder


def assert_equal(found: CachedSample, expected: CachedSample):
    for name in ("ids", "attention_mask", "loss_mask", "hidden", "last_hidden"):
        a, b = getattr(found, name), getattr(expected, name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32), err_msg=name)


def test_samples_of_odd_lengths_come_back_over_several_shards(tmp_path):
    samples = [sample(n, n) for n in (3, 5, 1, 7, 2)]
    cache = TargetCache(write(tmp_path / "c", samples, shard_bytes=240))
    assert cache.manifest["num_shards"] == len(list((tmp_path / "c").glob("shard-*.bin"))) == 3
    assert cache.lengths.tolist() == [3, 5, 1, 7, 2]
    for i, expected in enumerate(samples):
        assert_equal(cache[i], expected)
    assert not (tmp_path / "c" / ".writing").exists()


def test_the_bytes_are_those_of_version_2(tmp_path):
    one, two = sample(3, 1), sample(2, 2)
    write(tmp_path, [one, two], free={"chat_template": "x"})

    def payload(s):
        arrays = (s.ids, s.attention_mask, s.loss_mask, s.hidden, s.last_hidden)
        return b"".join(a.tobytes() for a in arrays)

    assert (tmp_path / "shard-00000.bin").read_bytes() == payload(one) + payload(two)
    start = 3 * (4 + 1 + 1 + 16 + 8)
    assert (tmp_path / "samples.idx").read_bytes() == struct.pack(
        "<QIIQQQQQ", 0, 0, 3, 0, 12, 15, 18, 18 + 48
    ) + struct.pack("<QIIQQQQQ", 1, 0, 2, *(start + n for n in (0, 8, 10, 12, 12 + 32)))
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "version": 2,
        "num_samples": 2,
        "num_shards": 1,
        "target_layer_ids": [1, 2],
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": 56,
        "hidden_size": 4,
        "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}],
        "chat_template": "x",
    }


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with TargetCacheWriter(tmp_path, target_layer_ids=LAYERS, hidden_size=D) as writer:
            writer.add(sample(3))
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError) as refusal:
        TargetCache(tmp_path)
    assert refusal.value.what.endswith("holds no manifest.json.")


def test_what_cannot_be_written_is_refused(tmp_path):
    write(tmp_path / "old", [sample(2)])
    for folder, layers, free, message in (
        ("old", LAYERS, {}, "already holds a target cache"),
        ("new", (2, 1), {}, "The target layers [2, 1] do not ascend."),
        ("new", LAYERS, {"version": 3}, "The manifest keys version were given as free fields."),
    ):
        with pytest.raises(CheckpointError) as refusal:
            TargetCacheWriter(tmp_path / folder, target_layer_ids=layers, hidden_size=D, free=free)
        assert message in refusal.value.what
    with TargetCacheWriter(tmp_path / "new", target_layer_ids=LAYERS, hidden_size=8) as writer:
        with pytest.raises(CheckpointError) as refusal:
            writer.add(sample(3))
        assert refusal.value.what == (
            "Sample 0 has hidden of type bfloat16 and shape [3, 8]; the cache stores bfloat16 "
            "[3, 16]."
        )


def damage_manifest(**changes):
    def damage(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def damage_record(field, value):
    def damage(folder):
        path = folder / "samples.idx"
        records = np.frombuffer(path.read_bytes(), RECORD).copy()
        records[field][1] = value
        path.write_bytes(records.tobytes())

    return damage


def cut(name, count):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-count])

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("shard-00000.bin", 1), "1 samples, the first of them 1, do not lie whole"),
        (cut("samples.idx", 8), "2 samples need 112 bytes, it has 104"),
        (lambda f: (f / "shard-00000.bin").unlink(), "the manifest names this shard"),
        (lambda f: (f / "manifest.json").write_text("{"), "it is no JSON"),
        (damage_manifest(version=1), "says version 1; this reader knows 2"),
        (damage_manifest(hidden_dtype="float16"), "says hidden_dtype 'float16'"),
        (damage_manifest(num_shards=2), "its 2 shards are numbered [0]"),
        (damage_record("sample_id", 5), "its sample ids are not 0, 1, 2"),
        (damage_record("shard_id", 1), "it names a shard that is not there"),
        (damage_record("loss_mask", 0), "1 samples, the first of them 1, do not lie whole"),
    ],
)
def test_a_damaged_cache_is_refused(tmp_path, damage, message):
    write(tmp_path, [sample(3), sample(2)])
    damage(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        TargetCache(tmp_path)
    assert message in refusal.value.what
