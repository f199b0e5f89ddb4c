"""Networks of random weights, made on the device, for configs that have no checkpoint."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.assembly import Assembled, planner_of
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.params import ParamSpec, build_params
from deepinfer_jax.ops.device import Device, devices, free_bytes
from deepinfer_jax.runner.compile import compiled, one_device_mesh, replicated
from deepinfer_jax.settings import EngineConfig

_NOISE = 4_000_037  # a prime, so that no row of a weight repeats another


def random_network(config: ModelConfig, engine: EngineConfig, seed: int = 0) -> Assembled:
    """What `assemble` makes, with weights from `seed` in place of a checkpoint's.

    A step takes the same time as with trained weights, but for what depends on values: nothing
    in its shapes does.

    Raises:
        ConfigError: weights that are not dequantized, Engram tables off the device, or a number
            of table rows that the hash does not address.
        MemoryPlanError: weights and caches need more than the device can give.
    """
    if engine.weights != "dequantized" or engine.engram != "device":
        raise ConfigError(
            f"Random weights were asked for with engine.weights={engine.weights} and "
            f"engine.engram={engine.engram}.",
            "They are made on the device, as dequantized arrays.",
            "Use engine.weights=dequantized and engine.engram=device.",
        )
    planner = planner_of(config, engine, Device.of(devices()[0]), free=free_bytes(devices()[0]))
    network, plan = planner.network, planner.fitting(engine)
    vocab, classes = config.vocab_size, config.engram_compressed_vocab_size
    token_map = np.arange(vocab, dtype=np.int32) % np.int32(classes)
    mesh = one_device_mesh()
    whole = replicated(mesh)
    made = build_params(
        config,
        _leaf(seed, network.arithmetic.dtype),
        token_map=token_map,
        positions=plan.positions,
    )
    params = jax.block_until_ready(jax.device_put(made, whole))
    return Assembled(network, params, (), mesh, plan, None)


def _leaf(seed: int, dtype: Any) -> Callable[[ParamSpec], jax.Array]:
    """Makes one leaf at a time; leaves of one shape share a program, all share their noise.

    A program of its own generator for every shape would take longer to compile than to run.
    """
    rng = np.random.default_rng(seed)
    noise = jnp.asarray(rng.standard_normal(_NOISE, np.float32))
    programs: dict[Any, Callable[..., jax.Array]] = {}

    def leaf(spec: ParamSpec) -> jax.Array:
        kind = spec.full_shape, jnp.dtype(jnp.float32) if spec.stored == "f32" else dtype
        if kind not in programs:
            programs[kind] = compiled(_cut(*kind))
        mean, deviation = _moments(spec)
        return programs[kind](noise, np.int32(rng.integers(_NOISE)), mean, deviation)

    return leaf


def _cut(shape: tuple[int, ...], dtype: Any) -> Callable[..., jax.Array]:
    """(noise, first, mean, deviation) -> an array of `shape`, the noise repeated as needed."""
    count = math.prod(shape)

    def cut(noise: jax.Array, first: jax.Array, mean: jax.Array, deviation: jax.Array) -> jax.Array:
        place = (jnp.arange(count, dtype=jnp.int32) + first) % noise.shape[0]
        return (mean + deviation * noise[place]).astype(dtype).reshape(shape)

    return cut


def _moments(spec: ParamSpec) -> tuple[np.float32, np.float32]:
    """Mean and deviation; what a sublayer adds stays below the residual streams."""
    if spec.name.endswith("norm"):
        found = 1.0, 0.1
    elif spec.name.endswith("embed"):
        found = 0.0, 1.0
    elif spec.name.endswith("_base"):
        found = -0.5, 0.1
    elif spec.name.endswith("_scale"):
        found = 0.3, 0.0
    else:
        found = 0.0, spec.shape[-1] ** -0.5
    return np.float32(found[0]), np.float32(found[1])
