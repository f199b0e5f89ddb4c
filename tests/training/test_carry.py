import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from training.networks import smoke_folder

from deepinfer_jax.checkpoint.export import encode
from deepinfer_jax.checkpoint.safetensors import write_safetensors
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.training import carry
from deepinfer_jax.training.carry import PIECE_BYTES, from_model, is_model, load, save
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.parameters import initial_values, shapes, to_checkpoint
from deepinfer_jax.training.quantize import round_weights
from deepinfer_jax.training.smoke import smoke_config

CONFIG = smoke_config()


def test_weights_come_back_in_bfloat16_and_mixes_exactly(tmp_path):
    values = initial_values(CONFIG, 0)
    save(tmp_path, 17, {"lr": 0.5}, values, CONFIG)
    carried = load(tmp_path, CONFIG)
    assert carried.step == 17
    assert carried.settings == {"lr": 0.5}
    for name, value in values.items():
        exact = ".hc_" in name or name.endswith((".attn_sink", ".gate.bias"))
        expected = value if exact else value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(carried.weights[name], expected)


def test_files_stay_below_their_limit(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=70_000, hidden_size=96)
    save(tmp_path, 0, {}, initial_values(config, 0), config)
    sizes = [p.stat().st_size for p in tmp_path.glob("weights_*.safetensors")]
    assert len(sizes) >= 2
    assert max(sizes) <= PIECE_BYTES


def test_what_nano_carries_between_pieces_stays_within_60_mib(tmp_path):
    config = ModelConfig.from_file(NANO)
    save(tmp_path, 0, {}, {n: np.zeros(s, np.float32) for n, s in shapes(config).items()}, config)
    assert 40 << 20 < sum(p.stat().st_size for p in tmp_path.iterdir()) <= 60 << 20


def test_a_save_cut_short_over_an_older_piece_leaves_nothing_to_load(tmp_path, monkeypatch):
    save(tmp_path, 1, {}, initial_values(CONFIG, 0), CONFIG)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(carry, "write_safetensors", full)
    with pytest.raises(OSError):
        save(tmp_path, 2, {}, initial_values(CONFIG, 1), CONFIG)
    with pytest.raises(CheckpointError, match="holds no state.json"):
        load(tmp_path, CONFIG)


def test_a_model_folder_gives_its_weights_at_the_step_that_is_named(tmp_path):
    smoke_folder(tmp_path)
    values = initial_values(CONFIG, 0)
    stored = encode(to_checkpoint(values, CONFIG), CONFIG, drafter=False)
    assert not is_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", stored)
    assert is_model(tmp_path)
    start = from_model(tmp_path, CONFIG, 30)
    assert (start.step, start.settings) == (30, {})
    rounded = round_weights({k: jnp.asarray(v) for k, v in values.items()}, CONFIG)
    for name, value in rounded.items():
        np.testing.assert_array_equal(start.weights[name], value, err_msg=name)
    save(tmp_path, 31, {}, start.weights, CONFIG)
    assert not is_model(tmp_path)


def test_a_model_folder_of_another_network_is_refused(tmp_path):
    other = dataclasses.replace(CONFIG, rope_theta=5000, index_topk=4)
    with pytest.raises(CheckpointError) as refusal:
        from_model(smoke_folder(tmp_path), other, 0)
    assert refusal.value.what.endswith("differs from the trained network's in rope_theta, "
                                       "index_topk.")  # fmt: skip
    assert "another network" in refusal.value.why
    assert "network that is trained" in refusal.value.do


def test_a_folder_without_a_state_is_refused(tmp_path):
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path, CONFIG)
    assert "holds no state.json" in refusal.value.what
    assert "--resume" in refusal.value.do


def test_weights_of_another_network_are_refused(tmp_path):
    save(tmp_path, 1, {}, initial_values(CONFIG, 0), CONFIG)
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 1
    other = dataclasses.replace(CONFIG, vocab_size=96)
    with pytest.raises(CheckpointError) as refusal:
        load(tmp_path, other)
    assert "embed.weight" in refusal.value.what
