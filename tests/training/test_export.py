import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.formats import decode_q4, decode_q8, decode_rows
from deepinfer_jax.checkpoint.inventory import inventory, stored_inventory
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.export import release_tensors
from deepinfer_jax.training.nano import smoke_config
from deepinfer_jax.training.parameters import initial_values, to_checkpoint
from deepinfer_jax.training.quantize import round_weights


def test_the_exported_weights_are_exactly_those_that_rounding_trains():
    config = smoke_config()
    values = initial_values(config, 0)
    stored = release_tensors(values, config)
    rounded = round_weights({k: jnp.asarray(v) for k, v in values.items()}, config)
    trained = to_checkpoint({k: np.asarray(v) for k, v in rounded.items()}, config)
    decoders = {"q8": decode_q8, "q4": decode_q4, "engram_table": decode_rows}
    for name, spec in inventory(config, drafter=False).items():
        value = stored[name]
        if spec.kind != "plain":
            scale = stored[name.removesuffix(".weight") + ".scale"]
            value = decoders[spec.kind](name, value, scale)
        np.testing.assert_array_equal(value.astype(np.float32), trained[name], err_msg=name)


def test_nano_fits_into_its_size_without_and_with_its_drafter():
    from pathlib import Path

    import deepinfer_jax

    nano = Path(deepinfer_jax.__file__).parent / "models" / "nano"
    config = ModelConfig.from_file(nano)
    for drafter, most in ((False, 24e6), (True, 30e6)):
        stored = stored_inventory(inventory(config, drafter=drafter), "release")
        assert sum(spec.nbytes for spec in stored.values()) < most
