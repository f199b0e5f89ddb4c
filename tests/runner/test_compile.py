import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.cache import Rows
from deepinfer_jax.model.params import build_params
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.runner.compile import (
    abstract,
    cache_key,
    keep_compiled,
    one_device_mesh,
    replicated,
    step_program,
)
from deepinfer_jax.runner.step import StepInput, init_state
from deepinfer_jax.sampling.sampler import RowParams
from deepinfer_jax.settings import package_folder

POSITIONS, SLOTS, ROWS, TAKEN = 4096, 8, 64, 8
WEIGHTS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def shape(dims, dtype):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.fixture(scope="module")
def mesh():
    return one_device_mesh()


@pytest.fixture(scope="module")
def release(mesh):
    """The release's step, lowered from shapes alone, and its three abstract arguments."""
    text = (package_folder("configs") / "v41_flash.toml").read_text()
    config = ModelConfig.from_dict(tomllib.loads(text)["model"])
    net = Network(config, arithmetic("release"), select(Device.described("cpu")))
    params = build_params(
        config,
        lambda spec: shape(spec.full_shape, WEIGHTS.get(spec.stored, jnp.bfloat16)),
        token_map=shape((config.vocab_size,), jnp.int32),
        positions=POSITIONS,
    )
    cache = jax.eval_shape(lambda: init_state(net, slots=SLOTS, positions=POSITIONS))
    column, taken = shape((ROWS,), jnp.int32), shape((TAKEN,), jnp.int32)
    draw = RowParams(
        temperature=shape((TAKEN,), jnp.float32),
        top_p=shape((TAKEN,), jnp.float32),
        top_k=taken,
        seed=shape((TAKEN, 2), jnp.uint32),
        position=taken,
    )
    inputs = StepInput(Rows(column, column, column, column, column), taken, draw)
    arguments = abstract((params, cache, inputs), replicated(mesh))
    program = step_program(net, mesh, draw="stable", logprobs="raw", top=0)
    return config, program.lower(*arguments), arguments


def donated(info):
    leaves = jax.tree.leaves(info, is_leaf=lambda x: hasattr(x, "donated"))
    return [leaf.donated for leaf in leaves]


def test_the_release_lowers_without_weights_and_each_run_of_layers_is_one_loop(release):
    config, lowered, _ = release
    several = [run for run in config.runs if len(run) > 1]
    assert (len(config.layers), len(config.runs), len(several)) == (40, 18, 8)
    text = lowered.as_text(debug_info=True)
    named = {f"layers_{run[0].layer}_{run[-1].layer}" for run in config.runs}
    assert all(f"{name}/" in text for name in named)
    # A run of several layers is a loop, so that 40 layers cost the code of 18.
    loops = [f"layers_{run[0].layer}_{run[-1].layer}/while" for run in several]
    assert all(loop in text for loop in loops)
    singles = [run[0].layer for run in config.runs if len(run) == 1]
    assert not any(f"layers_{layer}_{layer}/while/body/attention" in text for layer in singles)


def test_the_release_step_donates_the_cache_and_nothing_else(release):
    _, lowered, _ = release
    params, cache, inputs = lowered.args_info[0]
    assert len(donated(cache)) == 1 + 4 * 2 + 3 + 1 and all(donated(cache))
    assert not any(donated(params)) and not any(donated(inputs))
    text = lowered.as_text()
    # Every donated buffer is given to an output of its own shape.
    assert text.count("tf.aliasing_output") == len(donated(cache))


def test_the_release_step_gives_back_a_cache_of_the_same_shapes_and_one_token_a_row(release):
    _, lowered, (_, cache, _) = release
    new_cache, out = lowered.out_info
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, new_cache, cache)
    assert all(jax.tree.leaves(same))
    assert out.draw.token.shape == (TAKEN,) and out.draw.token.dtype == jnp.int32
    assert out.top_ids.shape == (TAKEN, 0)


def test_every_argument_and_result_has_its_sharding_written_down(release, mesh):
    _, lowered, arguments = release
    everywhere = NamedSharding(mesh, PartitionSpec())
    results = jax.tree.leaves(lowered.out_info)
    assert all(leaf.sharding == everywhere for leaf in results)
    header = lowered.as_text().partition(") -> (")[0]
    assert header.count("%arg") == header.count("sdy.sharding = #sdy.sharding<@mesh")
    used = len(jax.tree.leaves(arguments))
    assert header.count("%arg") == used, "an argument is not used by the step"


def test_one_chip_is_a_mesh_of_one_device_with_the_data_axis(mesh):
    assert mesh.axis_names == ("data",) and mesh.devices.size == 1
    other = one_device_mesh(jax.devices()[3])
    assert other.devices.item() == jax.devices()[3]


@pytest.fixture
def compilation_cache():
    before = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.mark.usefixtures("compilation_cache")
def test_executables_are_kept_under_the_folder_that_was_asked_for_last(tmp_path):
    def compile_one(number):
        return jax.jit(lambda x: x * number + 1)(np.float32(2))

    compile_one(3)  # a process has usually compiled something before
    first = keep_compiled(tmp_path / "a")
    assert first == tmp_path / "a" / cache_key() and not list(first.iterdir())
    compile_one(5)
    kept = sorted(path.name for path in first.iterdir())
    assert kept
    second = keep_compiled(tmp_path / "b")
    compile_one(7)
    assert list(second.iterdir())
    assert sorted(path.name for path in first.iterdir()) == kept


def test_the_key_names_the_version_and_is_stable():
    assert cache_key() == cache_key()
    assert cache_key().startswith(f"jax-{jax.__version__}-")
