import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.training.carry import PIECE_BYTES, load, save
from deepinfer_jax.training.nano import smoke_config
from deepinfer_jax.training.parameters import initial_values

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
