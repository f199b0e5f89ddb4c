import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.ops.quant import qdq_fp4
from deepinfer_jax.training.parameters import initial_values, specs
from deepinfer_jax.training.quantize import round_q8, round_weights, straight_through
from deepinfer_jax.training.smoke import smoke_config


def test_weights_are_rounded_to_the_golden_values(golden):
    data = np.load(golden / "formats.npz")
    w = jnp.asarray(data["w"])
    np.testing.assert_array_equal(round_q8(w), data["w_fp8_dequant"])
    np.testing.assert_array_equal(qdq_fp4(w), data["w_fp4_dequant"])


def test_rounding_passes_the_gradient_unchanged():
    x = jnp.linspace(-3, 3, 64)
    slope = jax.grad(lambda x: jnp.sum(straight_through(qdq_fp4, x) * jnp.arange(64.0)))(x)
    np.testing.assert_array_equal(slope, np.arange(64.0))


def test_every_quantized_tensor_changes_and_the_float32_ones_do_not():
    config = smoke_config()
    values = {k: jnp.asarray(v) for k, v in initial_values(config, 0).items()}
    rounded = round_weights(values, config)
    for name, spec in specs(config).items():
        changed = bool(jnp.any(rounded[name] != values[name]))
        if spec.kind != "plain":
            assert changed, name
        if spec.dtypes[0] == "F32":
            assert not changed, name
