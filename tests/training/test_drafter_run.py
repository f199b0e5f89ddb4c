import dataclasses
import json
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training.networks import smoke_folder

from deepinfer_jax.checkpoint.export import export
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.checkpoint.shards import open_checkpoint
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError
from deepinfer_jax.training import drafter_piece, drafter_state
from deepinfer_jax.training.draft import main, smoke_drafter_config, smoke_settings
from deepinfer_jax.training.drafter_export import DRAFTER_FILE, add_drafter, write_drafter
from deepinfer_jax.training.drafter_piece import METRICS
from deepinfer_jax.training.drafter_state import STATE, read_header
from deepinfer_jax.training.drafter_step import (
    begin,
    drafter_specs,
    initial_weights,
    learning_rate,
    update,
)
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.parameters import initial_values, to_checkpoint
from deepinfer_jax.training.quantize import round_tensors
from deepinfer_jax.training.target_cache import TargetCache

CONFIG = smoke_drafter_config()


def lines(folder):
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def states(folder):
    arrays = {}
    for name in read_header(folder).files:
        part = open_checkpoint(folder / name)
        arrays |= {tensor: part.array(tensor) for tensor in part.tensors}
    return arrays


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "target"
    main(f"--method dspark --smoke --write-target-cache {folder} --batches 3".split())
    return folder


@pytest.fixture(scope="module")
def dspark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dspark")
    main(["--method", "dspark", "--smoke", "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("eagle3")
    main(f"--method eagle3 --smoke --target-cache {cache} --out {folder}".split())
    return folder


def test_a_cache_of_the_target_holds_its_conversations(cache):
    found = TargetCache(cache)
    assert found.lengths.tolist() == [32] * 24
    assert found.manifest["target_layer_ids"] == list(CONFIG.dspark_target_layer_ids)
    # A first tap is the embedding, the same in every stream.
    sample = found[5]
    embedded = jnp.asarray(initial_values(CONFIG, 0)["embed.weight"])[sample.ids]
    expected = np.asarray(embedded.astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(sample.hidden[:, :32].astype(np.float32), expected)


def test_a_run_learns_logs_and_exports_every_tensor_of_the_inventory(dspark):
    rows = lines(dspark)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    names = ("ce", "tv", "confidence", "accept_rate@2", "tau_probabilistic", "confidence_bias")
    assert set(names) <= set(rows[0])
    found = open_checkpoint(dspark / DRAFTER_FILE)
    assert found.metadata[0]["drafter"] == "dspark"
    weights = {n: a for n, a in states(dspark).items() if n.startswith(".weights")}
    before = initial_weights("dspark", CONFIG, smoke_settings().seed)
    for name, value in before.items():
        assert (weights[f".weights['{name}']"] != value).any(), name


def test_dflash_runs_from_a_cache_and_exports_heads_of_zero(cache, tmp_path):
    main(f"--method dflash --smoke --target-cache {cache} --out {tmp_path} --steps 2".split())
    assert "confidence" not in lines(tmp_path)[0]
    found = open_checkpoint(tmp_path / DRAFTER_FILE)
    assert not found.array("mtp.0.markov_head.embed.weight").astype(np.float32).any()
    assert not any("markov" in name for name in states(tmp_path))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(cache, eagle3, tmp_path):
    command = f"--method eagle3 --smoke --target-cache {cache} --out {tmp_path}".split()
    main([*command, "--until", "3"])
    assert read_header(tmp_path).step == 3
    assert not (tmp_path / DRAFTER_FILE).exists()
    # What a piece logged after its last saved state belongs to steps that were lost.
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 5}\n')
    main([*command, "--resume"])
    whole, parts = states(eagle3), states(tmp_path)
    assert int(whole[".step"]) == 6
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array, err_msg=name)
    assert [row["step"] for row in lines(tmp_path)] == [2, 3, 4, 6]
    assert lines(tmp_path)[-1]["loss"] == lines(eagle3)[-1]["loss"]
    assert len(list(tmp_path.glob("state-*"))) == 1
    first, second = (folder / DRAFTER_FILE for folder in (eagle3, tmp_path))
    assert first.read_bytes() == second.read_bytes()


def test_a_save_cut_short_leaves_the_older_state(tmp_path, monkeypatch):
    state = begin("eagle3", CONFIG, smoke_settings())
    drafter_state.save(tmp_path, state, "eagle3", {})

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(drafter_state, "write_safetensors", full)
    later = dataclasses.replace(state, step=state.step + 1)
    with pytest.raises(OSError):
        drafter_state.save(tmp_path, later, "eagle3", {})
    assert int(drafter_state.load(tmp_path, state).step) == 0


def test_what_nano_hands_to_the_next_piece_is_exact_and_in_small_files(tmp_path):
    config = ModelConfig.from_file(NANO)
    state = begin("dspark", config, smoke_settings())
    drafter_state.save(tmp_path, state, "dspark", {"lr": 0.5})
    sizes = [p.stat().st_size for p in tmp_path.glob("state-*")]
    assert max(sizes) <= drafter_state.PIECE_BYTES
    assert len(sizes) <= 5
    assert read_header(tmp_path).settings == {"lr": 0.5}
    back = drafter_state.load(tmp_path, state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = smoke_folder(tmp_path_factory.mktemp("model"), CONFIG)
    weights = to_checkpoint(initial_values(CONFIG, 0), CONFIG)
    raw = json.loads((folder / "config.json").read_text())
    assert ModelConfig.from_file(folder).num_nextn_predict_layers == 1
    return export(folder, weights, raw, drafter=False)


def test_a_trained_drafter_goes_into_the_model_folder_as_training_rounded_it(
    dspark, model, tmp_path
):
    size = add_drafter(dspark / DRAFTER_FILE, model, tmp_path)
    assert size == sum(p.stat().st_size for p in tmp_path.iterdir())
    config = ModelConfig.from_file(tmp_path)
    loaded = load(tmp_path, config, drafter=True, dtype="float32")
    found = states(dspark)
    names = drafter_specs("dspark", CONFIG)
    masters = {n: jnp.asarray(found[f".weights['{n}']"]) for n in names}
    rounded = to_checkpoint(round_tensors(masters, names), CONFIG, drafter=True)
    for name, value in rounded.items():
        if not name.endswith("bias_vl"):
            np.testing.assert_array_equal(loaded.tensors[name], value, err_msg=name)
    before = open_checkpoint(model)
    after = open_checkpoint(tmp_path)
    for name in before.tensors:
        np.testing.assert_array_equal(after.raw(name), before.raw(name))
    again = tmp_path / "again"
    add_drafter(dspark / DRAFTER_FILE, tmp_path, again)
    ours, theirs = (folder / "model.safetensors" for folder in (again, tmp_path))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_drafter_of_another_kind_is_refused(eagle3, model, tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        add_drafter(eagle3 / DRAFTER_FILE, model, tmp_path / "out")
    assert "the first is mtp.0" in refusal.value.what
    assert "--method dspark or dflash" in refusal.value.do
    assert not (tmp_path / "out").exists()


def test_nano_with_a_drafter_stays_below_30_mb(tmp_path):
    config = ModelConfig.from_file(NANO)
    weights = initial_weights("dspark", config, 0)
    size = write_drafter(tmp_path / DRAFTER_FILE, weights, "dspark", config)
    assert 3_000_000 < size < 5_000_000
    total = add_drafter(tmp_path / DRAFTER_FILE, NANO, tmp_path / "nano")
    assert total <= 30_000_000


def test_the_rate_rises_for_a_share_of_the_steps_and_falls_as_a_cosine():
    settings = dataclasses.replace(smoke_settings(), steps=100, lr=1.0, warmup=0.04)
    found = [float(learning_rate(settings, jnp.int32(s))) for s in (0, 1, 3, 4, 52, 100)]
    np.testing.assert_allclose(found, [0.25, 0.5, 1, 1, 0.5, 0], atol=1e-6)


def test_an_update_is_adam_behind_a_clip_and_moves_router_biases_by_load():
    settings = dataclasses.replace(smoke_settings(), lr=0.1, clip=1.0, bias_rate=0.5)
    state = begin("eagle3", CONFIG, settings)
    gradients = {n: jnp.zeros_like(w) for n, w in state.weights.items()}
    gradients["eagle3.norm.weight"] = jnp.full((CONFIG.hidden_size,), 3.0)
    step = jax.jit(partial(update, settings=settings))
    after, report = step(state, gradients, jnp.asarray([[4.0, 0.0, 2.0, 2.0]]))
    norm = 3 * np.sqrt(CONFIG.hidden_size)
    np.testing.assert_allclose(report["norm"], norm, rtol=1e-6)
    g = 3.0 / norm
    np.testing.assert_allclose(after.m["eagle3.norm.weight"], 0.1 * g, rtol=1e-5)
    np.testing.assert_allclose(after.v["eagle3.norm.weight"], 0.001 * g * g, rtol=1e-4)
    moved = 1 - float(report["rate"]) * g / (g + settings.eps)
    np.testing.assert_allclose(after.weights["eagle3.norm.weight"], moved, rtol=1e-5)
    np.testing.assert_allclose(after.weights["eagle3.ffn.gate.bias"], [-0.5, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ("--method eagle3 --smoke --out {eagle3}", ConfigError, "already holds the state of a run"),
        (
            "--method dflash --smoke --resume --out {eagle3}",
            ConfigError,
            "holds a run of method eagle3, and dflash was asked for",
        ),
        ("--method dspark --smoke --resume --out {empty}", CheckpointError, "holds no state.json"),
        ("--method dspark --smoke --steps 0 --out {empty}", ConfigError, "The run has 0 steps"),
        ("--method dspark --smoke --set lrr=1 --out {empty}", ConfigError, "named 'lrr'"),
    ],
)
def test_a_command_that_cannot_run_is_refused(eagle3, tmp_path, arguments, kind, message):
    with pytest.raises(kind) as refusal:
        main(arguments.format(eagle3=eagle3, empty=tmp_path).split())
    assert message in refusal.value.what


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method dspark", "--out is missing."),
        ("--method dspark --out a --write-target-cache b", "--write-target-cache and --out"),
    ],
)
def test_options_that_exclude_each_other_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_state_of_another_network_is_refused(eagle3):
    other = begin("eagle3", dataclasses.replace(CONFIG, q_lora_rank=64), smoke_settings())
    with pytest.raises(CheckpointError) as refusal:
        drafter_state.load(eagle3, other)
    assert "wq_a" in refusal.value.what or "q_norm" in refusal.value.what


def test_a_run_that_diverges_stops_and_saves_nothing(tmp_path):
    log = drafter_piece._Log(tmp_path / METRICS, 0)
    log.add({"loss": jnp.float32(jnp.nan), "norm": jnp.float32(1), "slots": jnp.zeros(3)})
    with pytest.raises(ConfigError) as refusal:
        log.write(7)
    assert refusal.value.what.startswith("The run has diverged: loss nan")
    assert (tmp_path / METRICS).read_text() == ""


def test_a_piece_that_has_no_time_left_saves_where_it_stands(cache, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "deepinfer_jax.training")
    monkeypatch.setattr(drafter_piece, "_compile", lambda *_: {})
    main(f"--method eagle3 --smoke --target-cache {cache} --out {tmp_path} --seconds 0".split())
    assert read_header(tmp_path).step == 0
    assert (tmp_path / STATE).exists()
    assert any(m.startswith("stopped at step 0") for m in caplog.messages)
