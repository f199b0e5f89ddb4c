"""Assembling a network: what is read, when it is placed, and whether it fits."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from short_llm import short_config, write_short_model

from deepinfer_jax import assembly
from deepinfer_jax.assembly import assemble, host_memory
from deepinfer_jax.checkpoint.load import Weights
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import Checkpoint, open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError, MemoryPlanError
from deepinfer_jax.report.plan import nbytes
from deepinfer_jax.runner.step import init_state
from deepinfer_jax.settings import EngineConfig

CONFIG = ModelConfig.from_dict(short_config())
LIMIT = CONFIG.max_position_embeddings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_short_model(tmp_path_factory.mktemp("model") / "short")


@pytest.fixture(scope="module")
def token_map():
    return np.arange(CONFIG.vocab_size, dtype=np.int32)


@pytest.fixture
def opened(folder, token_map):
    """Assembles the short model: keywords of `assemble`, and fields of the engine."""

    def make(*, available_bytes=None, progress=None, config=CONFIG, place=folder, **engine):
        asked = EngineConfig(model=str(place), **({"arithmetic": "f32"} | engine))
        return assemble(
            place, config, asked, token_map, available_bytes=available_bytes, progress=progress
        )

    return make


@pytest.mark.parametrize("arithmetic", ["f32", "release"])
@pytest.mark.parametrize("weights", ["dequantized", "packed"])
@pytest.mark.parametrize("engram", ["device", "host", "mmap"])
def test_the_plan_is_what_is_held(opened, arithmetic, weights, engram):
    net = opened(arithmetic=arithmetic, weights=weights, engram=engram, max_num_seqs=3)
    tables = nbytes(net.params.engram_tables)
    assert net.plan.weights == nbytes(net.params) - tables
    outside = sum(t.codes.nbytes + t.scales.nbytes for t in net.tables if engram == "host")
    # These tests run on a CPU, whose memory is the host's.
    assert net.plan.engram_tables == tables + outside
    assert (outside > 0) == (engram == "host") and (tables > 0) == (engram == "device")
    state = init_state(net.network, slots=3, positions=net.positions)
    assert net.plan.cache == nbytes(state)
    assert (net.plan.slots, net.positions, net.plan.free) == (3, LIMIT, None)


def test_a_leaf_is_placed_before_the_next_is_read_and_nothing_is_read_twice(opened, monkeypatch):
    events = []
    read, put = Weights.__getitem__, jax.device_put

    def looked_up(self, name):
        events.append(name)
        return read(self, name)

    def placed(x, *where):
        events.append(None)
        return put(x, *where)

    monkeypatch.setattr(Weights, "__getitem__", looked_up)
    monkeypatch.setattr(assembly.jax, "device_put", placed)
    net = opened()
    names = [name for name in events if name is not None]
    assert len(names) == len(set(names))
    leaves = len(jax.tree.leaves(net.params)) - 3  # without the derived tables
    assert events.count(None) == leaves + 1  # and once for those
    longest = max(len(x) for x in "".join("r" if e else "p" for e in events).split("p"))
    experts = CONFIG.n_routed_experts * max(len(run) for run in CONFIG.runs)
    assert longest == experts


def test_the_drafter_of_a_checkpoint_is_checked_and_not_read(golden, monkeypatch):
    config = ModelConfig.from_file(golden)
    read, look_up = set(), Weights.__getitem__
    monkeypatch.setattr(
        Weights, "__getitem__", lambda self, name: read.add(name) or look_up(self, name)
    )
    engine = EngineConfig(model=str(golden), arithmetic="f32")
    token_map = np.load(golden / "engram.npz")["tiny_token_map"]
    file = golden / "model_release.safetensors"
    assemble(file, config, engine, token_map)
    assert read and not [name for name in read if name.startswith(("mtp.", "vision."))]


def test_loading_reports_bytes_up_to_their_total(opened):
    calls = []
    net = opened(weights="packed", progress=lambda *call: calls.append(call))
    loads = [(done, total) for phase, done, total in calls if phase == "load"]
    done = [d for d, _ in loads]
    (total,) = {t for _, t in loads}
    assert done == sorted(done) and done[-1] == total
    derived = (net.params.token_map, net.params.rope_plain, net.params.rope_compressed)
    assert total == nbytes(net.params) - nbytes(derived)


def test_files_that_change_while_they_are_placed_are_refused(opened, tmp_path, token_map):
    place = write_short_model(tmp_path / "model")
    file = place / "model.safetensors"
    whole = file.read_bytes()

    def replace(phase, done, total):
        if phase == "load" and done == total:
            file.unlink()
            file.write_bytes(whole + b"x")

    with pytest.raises(CheckpointError, match="changed while it was read"):
        opened(place=place, progress=replace)


def stored_tensors(folder):
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.array(name) for name in checkpoint.tensors}


def test_float32_tensors_that_the_release_stores_in_bfloat16_follow_the_arithmetic(
    folder, opened, tmp_path
):
    stored = stored_tensors(folder)
    wide = [n for n in stored if n.endswith(("compressor.wkv.weight", "engram.q_weight"))]
    assert wide
    stored |= {n: stored[n].astype(np.float32) for n in wide}
    write_safetensors(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps(short_config()))
    narrow, same = opened(place=tmp_path, arithmetic="release"), opened(arithmetic="release")
    for made, expected in zip(
        jax.tree.leaves(narrow.params), jax.tree.leaves(same.params), strict=True
    ):
        assert made.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(made), np.asarray(expected))
    run = next(run for run in narrow.params.runs if run.compressor is not None)
    assert run.compressor.wkv.dtype == ml_dtypes.bfloat16 and run.hc_attn.fn.dtype == np.float32


def test_without_a_length_memory_decides_it_before_the_models_limit_does(opened):
    free = opened(max_num_seqs=4).plan.total * 2
    whole = opened(max_num_seqs=4, available_bytes=free)
    assert (whole.positions, whole.plan.fits) == (LIMIT, True)
    for tokens in (1000, 520, 300):
        # Memory for so many tokens, once a tenth is left out.
        room = opened(max_num_seqs=4, max_model_len=tokens).plan.total
        net = opened(max_num_seqs=4, available_bytes=room * 10 // 9 + 1)
        assert net.positions == tokens // 256 * 256
        assert net.plan.total <= 0.9 * net.plan.free and net.plan.fits
        assert net.params.rope_plain.shape[0] == net.positions


def test_a_length_that_was_asked_for_is_kept_or_refused(opened):
    total = opened(max_num_seqs=4, max_model_len=700).plan.total
    assert opened(max_num_seqs=4, max_model_len=700, available_bytes=total).positions == 700
    with pytest.raises(MemoryPlanError):
        opened(max_num_seqs=4, max_model_len=700, available_bytes=total - 1)


def refusal(opened, monkeypatch, **asked):
    with monkeypatch.context() as patch, pytest.raises(MemoryPlanError) as caught:
        patch.setattr(Checkpoint, "array", None)  # no weight may be read
        opened(**asked)
    return caught.value


def test_sizes_that_do_not_fit_are_refused_with_sizes_that_do(opened, monkeypatch):
    asked = {"max_num_seqs": 64, "max_model_len": LIMIT}
    plan = opened(**asked).plan
    free = plan.weights + plan.engram_tables + plan.cache * 3 // 4
    error = refusal(opened, monkeypatch, available_bytes=free, **asked)
    gib = 2**30
    assert error.what == (
        f"The engine needs {plan.total / gib:.3f} GiB ({plan.total:,} bytes), and "
        f"{free / gib:.3f} GiB are available."
    )
    assert error.why == (
        f"Weights take {plan.weights / gib:.3f} GiB, Engram tables "
        f"{plan.engram_tables / gib:.3f} GiB, and the caches of 64 sequences of {LIMIT} tokens "
        f"{plan.cache / gib:.3f} GiB."
    )
    words = error.do.removesuffix(".").split()
    length, count = int(words[5].removesuffix(",")), int(words[-1])
    assert error.do == (
        f"Set engine.max_model_len to at most {length}, or engine.max_num_seqs to at most {count}."
    )
    assert 0 < length < LIMIT and 0 < count < 64
    for fitting in ({"max_model_len": length}, {"max_num_seqs": count}):
        assert opened(available_bytes=free, **(asked | fitting)).plan.fits


def test_when_neither_size_helps_alone_both_are_advised(opened, monkeypatch):
    # Rings cost memory per sequence, whatever its length; entries per token.
    small = opened(max_num_seqs=1, max_model_len=64).plan.total
    error = refusal(
        opened,
        monkeypatch,
        available_bytes=small * 10 // 9 + 1,
        max_num_seqs=10_000,
        max_model_len=LIMIT,
    )
    head = "Set engine.max_num_seqs to 1 and engine.max_model_len to at most "
    assert error.do.startswith(head)
    assert 64 <= int(error.do.removeprefix(head).removesuffix(".")) < LIMIT


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        (
            {},
            "Keep the weights packed (engine.weights=packed), or leave the Engram tables on disk "
            "(engine.engram=mmap), or run where there is more memory.",
        ),
        (
            {"weights": "packed", "engram": "host"},
            "Leave the Engram tables on disk (engine.engram=mmap), or run where there is more "
            "memory.",
        ),
        ({"weights": "packed", "engram": "mmap"}, "Run where there is more memory."),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_other_places_for_them(
    opened, monkeypatch, engine, advice
):
    assert refusal(opened, monkeypatch, available_bytes=1000, **engine).do == advice


def test_tables_elsewhere_do_not_count(opened):
    packed = {"weights": "packed", "max_num_seqs": 1, "max_model_len": 64}
    apart = opened(engram="mmap", **packed).plan
    assert opened(engram="mmap", available_bytes=apart.total, **packed).plan.fits
    for place in ("host", "device"):
        with pytest.raises(MemoryPlanError):
            opened(engram=place, available_bytes=apart.total, **packed)


def test_a_length_beyond_the_models_limit_is_refused(opened):
    with pytest.raises(ConfigError, match=f"max_model_len is 2000; the model's limit is {LIMIT}"):
        opened(max_model_len=2000)


def test_another_tokenizer_is_refused(folder, tmp_path, token_map):
    stored = stored_tensors(folder)
    file = tmp_path / "model.safetensors"
    write_safetensors(file, stored, metadata={"tokenizer_sha256": "ab" * 32})
    engine = EngineConfig(arithmetic="f32")
    assemble(file, CONFIG, engine, token_map, tokenizer_sha256="ab" * 32)
    with pytest.raises(CheckpointError, match=r"belongs to the tokenizer.json of SHA-256 (ab)+,"):
        assemble(file, CONFIG, engine, token_map, tokenizer_sha256="cd" * 32)


def test_rows_of_tables_outside_depend_on_the_look_back_alone(opened, token_map):
    net = opened(engram="mmap")
    look_up = host_memory(net, token_map)
    ids = np.random.default_rng(0).integers(3, CONFIG.image_token_id, 40)
    whole = look_up(ids, 0, 40)
    assert [part.shape for part in whole] == [(40, 6 * 32)] * 2
    for start, stop in ((0, 1), (7, 8), (13, 40)):
        for part, expected in zip(look_up(ids, start, stop), whole, strict=True):
            np.testing.assert_array_equal(part, expected[start:stop])


def test_an_image_token_blocks_the_ngrams_that_hold_it(opened, token_map):
    net = opened(engram="mmap")
    look_up = host_memory(net, token_map)
    text = np.full(8, 5)
    image = text.copy()
    image[2] = CONFIG.image_token_id
    plain, blocked = (look_up(ids, 0, 8)[0] for ids in (text, image))
    differs = (plain != blocked).any(1)
    order = CONFIG.engram_max_ngram_size
    assert differs[2] and not differs[:2].any() and not differs[2 + order :].any()
    changed = dataclasses.replace(CONFIG, image_token_id=None)
    free = host_memory(opened(engram="mmap", config=changed), token_map)(text, 0, 8)
    np.testing.assert_array_equal(free[0], plain)
