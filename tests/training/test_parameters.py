import numpy as np
import pytest
from training.networks import tiny_checkpoint

from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.errors import CheckpointError
from deepinfer_jax.training.parameters import (
    from_checkpoint,
    initial_values,
    shapes,
    to_checkpoint,
)
from deepinfer_jax.training.smoke import smoke_config


def test_a_checkpoint_goes_in_and_comes_out_with_the_text_bias_for_images():
    config = smoke_config()
    values = initial_values(config, 3)
    values["layers.0.ffn.gate.bias"] = np.arange(4, dtype=np.float32)
    tensors = to_checkpoint(values, config)
    assert {n: t.shape for n, t in tensors.items()} == {
        n: spec.shape for n, spec in inventory(config, drafter=False).items()
    }
    np.testing.assert_array_equal(tensors["layers.0.ffn.gate.bias_vl"], np.arange(4))
    back = from_checkpoint(tensors, config)
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


def test_the_tiny_release_checkpoint_has_every_trained_tensor(golden):
    config, tensors = tiny_checkpoint(golden)
    values = from_checkpoint(tensors, config)
    assert values["layers.3.ffn.experts.w2.weight"].shape == (8, 128, 64)
    expected = tensors["layers.3.ffn.experts.5.w2.weight"]
    np.testing.assert_array_equal(values["layers.3.ffn.experts.w2.weight"][5], expected)


def test_a_missing_tensor_is_named():
    config = smoke_config()
    tensors = to_checkpoint(initial_values(config, 0), config)
    del tensors["layers.1.ffn.experts.2.w3.weight"]
    with pytest.raises(CheckpointError) as refusal:
        from_checkpoint(tensors, config)
    assert "layers.1.ffn.experts.2.w3.weight" in refusal.value.what


def test_a_tensor_of_another_shape_is_refused():
    config = smoke_config()
    tensors = to_checkpoint(initial_values(config, 0), config)
    tensors["embed.weight"] = np.zeros((64, 16), np.float32)
    with pytest.raises(CheckpointError) as refusal:
        from_checkpoint(tensors, config)
    assert "embed.weight has shape [64, 16]; the config gives [64, 32]" in refusal.value.what


def test_initial_values_depend_on_the_seed_alone():
    config = smoke_config()
    a, b, c = initial_values(config, 1), initial_values(config, 1), initial_values(config, 2)
    assert set(a) == set(shapes(config))
    assert all(np.array_equal(a[n], b[n]) for n in a)
    assert not np.array_equal(a["embed.weight"], c["embed.weight"])
