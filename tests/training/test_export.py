import jax.numpy as jnp
import numpy as np
import pytest
from training.networks import smoke_folder

from deepinfer_jax.checkpoint.inventory import inventory, stored_inventory
from deepinfer_jax.checkpoint.load import load
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.training import carry
from deepinfer_jax.training.export import export_run, main
from deepinfer_jax.training.nano_data import NANO
from deepinfer_jax.training.parameters import initial_values, to_checkpoint
from deepinfer_jax.training.quantize import round_weights
from deepinfer_jax.training.smoke import smoke_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    carry.save(folder, 3, {}, initial_values(smoke_config(), 0), smoke_config())
    return folder


@pytest.fixture(scope="module")
def like(tmp_path_factory):
    folder = smoke_folder(tmp_path_factory.mktemp("like"))
    text = (folder / "config.json").read_text()
    # Nano's tokenizer has more ids than the smoke network's embedding has rows.
    (folder / "config.json").write_text(text.replace('"vocab_size": 64', '"vocab_size": 3072'))
    return folder


def test_the_exported_weights_are_exactly_those_that_rounding_trains(tmp_path, run, like):
    config = ModelConfig.from_file(like)
    values = initial_values(config, 0)
    carry.save(tmp_path / "run", 3, {}, values, config)
    folder = export_run(tmp_path / "run", tmp_path / "model", like=like)
    loaded = load(folder, config, dtype="float32", digest=False)
    assert loaded.spelling == "release"
    carried = carry.load(tmp_path / "run", config).weights
    rounded = round_weights({k: jnp.asarray(v) for k, v in carried.items()}, config)
    trained = to_checkpoint({k: np.asarray(v) for k, v in rounded.items()}, config)
    assert set(loaded.tensors) == set(trained)
    for name, value in trained.items():
        np.testing.assert_array_equal(loaded.tensors[name], value, err_msg=name)
    assert (folder / "tokenizer.json").read_bytes() == (like / "tokenizer.json").read_bytes()
    assert ModelConfig.from_file(folder) == config

    main([*map(str, (tmp_path / "run", tmp_path / "wide")), "--spelling", "dequantized"]
         + ["--like", str(like)])  # fmt: skip
    wide = load(tmp_path / "wide", config, dtype="float32", digest=False)
    assert wide.spelling == "dequantized"
    for name, value in to_checkpoint(carried, config).items():
        np.testing.assert_array_equal(wide.tensors[name], value, err_msg=name)


def test_a_network_whose_tokenizer_does_not_fit_is_refused_before_anything_is_written(
    tmp_path, run
):
    like = smoke_folder(tmp_path / "like")
    with pytest.raises(CheckpointError):
        export_run(run, tmp_path / "model", like=like)
    assert not (tmp_path / "model").exists()


def test_nano_fits_into_its_size_without_and_with_its_drafter():
    config = ModelConfig.from_file(NANO)
    for drafter, most in ((False, 24e6), (True, 30e6)):
        stored = stored_inventory(inventory(config, drafter=drafter), "release")
        assert sum(spec.nbytes for spec in stored.values()) < most
