"""Assembling a network: what is read, when it is placed, and whether it fits."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from short_llm import short_config, write_short_model

from deepinfer_jax import assembly
from deepinfer_jax.assembly import assemble, host_memory, planner_of
from deepinfer_jax.checkpoint.load import Weights
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError, MemoryPlanError
from deepinfer_jax.model.cache import init_cache
from deepinfer_jax.ops.device import Device
from deepinfer_jax.report.fit import ALTERNATIVES
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


@pytest.mark.parametrize("weights", ["dequantized", "packed"])
def test_a_drafter_is_read_whole_and_planned(golden, monkeypatch, weights):
    config, token_map = ModelConfig.from_file(golden), np.load(golden / "engram.npz")
    read, look_up = set(), Weights.__getitem__
    monkeypatch.setattr(
        Weights, "__getitem__", lambda self, name: read.add(name) or look_up(self, name)
    )
    engine = EngineConfig(model=str(golden), arithmetic="f32", weights=weights, max_num_seqs=3)
    file, calls = golden / "model_release.safetensors", []
    net = assemble(
        file,
        config,
        engine,
        token_map["tiny_token_map"],
        drafter=True,
        progress=lambda *call: calls.append(call),
    )
    drafts = {name for name in open_checkpoint(file).tensors if name.startswith("mtp.")}
    if weights == "dequantized":
        drafts = {name for name in drafts if not name.endswith(".scale")}
    # Drafts are text, so no stage routes an image.
    images = {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}
    assert {name for name in read if name.startswith("mtp.")} == drafts - images
    assert images < drafts
    assert net.plan.weights == nbytes(net.params) - nbytes(net.params.engram_tables)
    assert calls[-1][1] == calls[-1][2]
    cache = init_cache(
        config, net.network.arithmetic, slots=3, positions=net.positions, drafter=True
    )
    assert cache.draft is not None and cache.draft.shape[1:] == cache.window.shape[1:]
    assert net.plan.windows == nbytes((cache.window, cache.draft))
    state = init_state(net.network, slots=3, positions=net.positions)
    assert net.plan.cache == nbytes(state)


def test_a_drafter_that_is_not_there_is_refused(folder, token_map):
    engine = EngineConfig(arithmetic="f32")
    with pytest.raises(CheckpointError, match="no mtp"):
        assemble(folder, CONFIG, engine, token_map, drafter=True)
    without = dataclasses.replace(CONFIG, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers is 0"):
        assemble(folder, without, engine, token_map, drafter=True)


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
    assert (
        run.compressor.wkv.values.dtype == ml_dtypes.bfloat16 and run.hc_attn.fn.dtype == np.float32
    )


def test_without_a_length_memory_decides_it_before_the_models_limit_does(opened):
    free = opened(max_num_seqs=4).plan.total * 2
    whole = opened(max_num_seqs=4, available_bytes=free)
    assert (whole.positions, whole.plan.fits) == (LIMIT, True)
    for tokens in (1000, 520, 300):
        fits = opened(max_num_seqs=4, max_model_len=tokens).plan
        net = opened(max_num_seqs=4, available_bytes=fits.total + fits.step // 2)
        assert net.positions == tokens // 256 * 256
        assert net.plan.total < net.plan.free and net.plan.fits
        assert net.params.rope_plain.shape[0] == net.positions


def test_a_length_that_was_asked_for_is_kept_or_refused(opened):
    total = opened(max_num_seqs=4, max_model_len=700).plan.total
    assert opened(max_num_seqs=4, max_model_len=700, available_bytes=total).positions == 700
    with pytest.raises(MemoryPlanError):
        opened(max_num_seqs=4, max_model_len=700, available_bytes=total - 1)


def test_what_does_not_fit_is_refused_before_the_checkpoint_is_opened(
    opened, token_map, tmp_path, monkeypatch
):
    def reader(*arguments, **keywords):
        raise AssertionError("the checkpoint was opened")

    monkeypatch.setattr(assembly, "open_checkpoint", reader)
    monkeypatch.setattr(assembly, "load", reader)
    with pytest.raises(AssertionError, match="was opened"):
        opened(available_bytes=1 << 34)
    asked = {"max_num_seqs": 1600, "max_model_len": LIMIT}
    with pytest.raises(MemoryPlanError) as caught:
        opened(available_bytes=1 << 30, **asked)
    assert "and 1.000 GiB are available." in caught.value.what
    # As `deepinfer plan` answers, which has nothing but the config.
    device = Device.of(jax.devices()[0])
    engine = EngineConfig(arithmetic="f32", **asked)
    verdict = planner_of(CONFIG, engine, device, free=1 << 30).judge(engine)
    assert str(verdict.refusal) == str(caught.value)
    assert len(verdict.alternatives) == ALTERNATIVES
    for way in verdict.alternatives:
        with pytest.raises(AssertionError, match="was opened"):
            opened(available_bytes=1 << 30, **(asked | way.changes))


def test_tables_elsewhere_do_not_count(opened):
    packed = {"weights": "packed", "max_num_seqs": 1, "max_model_len": 64}
    packed |= {"max_num_batched_tokens": 1}  # a step's rows are looked up for it and count
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
