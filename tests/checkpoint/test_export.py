import dataclasses
import json

import numpy as np
import pytest

from deepinfer_jax.checkpoint.export import encode, export
from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def config_json(golden):
    return json.loads((golden / "config.json").read_text())


@pytest.fixture(scope="module")
def weights(config):
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(spec.shape).astype(np.float32) * 0.1
        for name, spec in inventory(config, drafter=False).items()
    }


def test_an_export_loads_as_the_network_it_was(tmp_path, weights, config_json):
    folder = export(tmp_path / "new", weights, config_json, drafter=False)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load(folder, ModelConfig.from_file(folder), dtype="float32")
    assert loaded.spelling == "release" and not loaded.drafter
    for name, array in weights.items():
        error = np.abs(loaded.tensors[name] - array).max() / np.abs(array).max()
        # Half a step of the format: E2M1 has one mantissa bit, E4M3 three, BF16 seven.
        assert error <= (1 / 4 if ".experts." in name else 1 / 16), name
    np.testing.assert_array_equal(loaded.tensors["layers.0.hc_attn_fn"],
                                  weights["layers.0.hc_attn_fn"])  # fmt: skip


def test_exporting_what_was_loaded_changes_no_weight(tmp_path, release_file, config, config_json):
    first = load(release_file, config, digest=False)
    for spelling in ("release", "dequantized"):
        folder = export(
            tmp_path / spelling, first.tensors, config_json, drafter=True, spelling=spelling
        )
        second = load(folder, config, digest=False)
        assert second.spelling == spelling and second.drafter
        for name, array in first.tensors.items():
            assert second.tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(second.tensors[name], array, err_msg=name)


def test_an_export_is_refused_beside_another_tokenizer(tmp_path, weights, config, config_json):
    mine, other = "ab" * 32, "cd" * 32
    file = tmp_path / "model.safetensors"
    export(tmp_path, weights, config_json, drafter=False, tokenizer_sha256=mine)
    load(tmp_path, config, digest=False, tokenizer_sha256=mine)
    load(tmp_path, config, digest=False)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, config, digest=False, tokenizer_sha256=other)
    assert str(caught.value) == (
        f"{file} belongs to the tokenizer.json of SHA-256 {mine}, and the tokenizer here has "
        f"{other}. With another tokenizer every token id would mean something else. "
        "Use the tokenizer.json that came with these weights."
    )
    export(tmp_path, weights, config_json, drafter=False)
    load(tmp_path, config, digest=False, tokenizer_sha256=other)


def test_weights_that_do_not_fit_are_listed(weights, config):
    wrong = {n: x for n, x in weights.items() if n != "norm.weight"}
    wrong |= {"head.weight": np.zeros((2, 2), np.float32), "mtp.0.x": np.zeros(1, np.float32)}
    with pytest.raises(CheckpointError) as caught:
        encode(wrong, config, drafter=False)
    assert caught.value.what == (
        "The weights do not fit the config in 3 places: norm.weight is missing; "
        "mtp.0.x is unexpected; head.weight is [2, 2], not [512, 128]."
    )


def test_a_width_without_whole_blocks_is_refused_by_name(config):
    odd = dataclasses.replace(config, moe_intermediate_size=48)
    zeros = {
        name: np.zeros(spec.shape, np.float32)
        for name, spec in inventory(odd, drafter=False).items()
    }
    with pytest.raises(ConfigError, match=r"w1\.weight would be 48 x 128"):
        encode(zeros, odd, drafter=False)
