import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import NamedSharding, PartitionSpec

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.model.params import build_params
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.table import select
from deepinfer_jax.runner.compile import (
    cache_key,
    keep_compiled,
    lower_step,
    one_device_mesh,
)
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.schedule import StepInput
from deepinfer_jax.runner.step import StepOptions, init_state, output_structure
from deepinfer_jax.settings import package_folder

POSITIONS, SLOTS, ROWS, TAKEN = 4096, 8, 64, 8
BUCKET = Bucket(rows=ROWS, decoder_rows=ROWS, parts=TAKEN, updates=41)
LOWERING_S = 60  # of one core's time, for the release's 40 layers
WEIGHTS = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def shape(dims, dtype):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.fixture(scope="module")
def mesh():
    return one_device_mesh()


def network(name):
    text = (package_folder("configs") / f"{name}.toml").read_text()
    config = ModelConfig.from_dict(tomllib.loads(text)["model"])
    return Network(config, arithmetic("release"), select(Device.described("cpu")))


def abstract_arguments(net):
    """(params, state, inputs) of a step, as shapes."""
    params = build_params(
        net.config,
        lambda spec: shape(spec.full_shape, WEIGHTS.get(spec.stored, jnp.bfloat16)),
        token_map=shape((net.config.vocab_size,), jnp.int32),
        positions=POSITIONS,
    )
    state = jax.eval_shape(lambda: init_state(net, slots=SLOTS, positions=POSITIONS))
    return (
        params,
        state,
        StepInput(shape((BUCKET.ints,), jnp.int32), shape((TAKEN, 2), jnp.float32)),
    )


@pytest.fixture(scope="module")
def release(mesh):
    """The release's step, lowered from shapes alone: config, program, arguments, seconds."""
    net = network("v41_flash")
    arguments = abstract_arguments(net)
    start = time.process_time()
    lowered = lower_step(net, mesh, arguments, bucket=BUCKET, options=StepOptions())
    return net.config, lowered, arguments, time.process_time() - start


def parts(arguments, leaves):
    """The leaves of params, state and inputs apart."""
    a, b, _ = (len(jax.tree.leaves(part)) for part in arguments)
    return leaves[:a], leaves[a : a + b], leaves[a + b :]


def donated(lowered, arguments):
    given, named = lowered.args_info
    assert not named
    return [[leaf.donated for leaf in part] for part in parts(arguments, given)]


def test_the_release_lowers_in_bounded_processor_time(release):
    # Time of the processor, not of the clock, so that a busy machine does not fail it.
    assert release[3] < LOWERING_S


def test_the_release_lowers_without_weights_and_each_run_of_layers_is_one_loop(release):
    config, lowered, *_ = release
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
    _, lowered, arguments, _ = release
    params, cache, inputs = donated(lowered, arguments)
    # Windows, four sources, look-back and page table; then tokens, lengths and ends.
    assert len(cache) == 1 + 4 * 2 + 3 + 2 + 3 and all(cache)
    assert not any(params) and not any(inputs)
    # Every donated buffer is given to an output of its own shape.
    assert lowered.as_text().count("tf.aliasing_output") == len(cache)


def test_the_release_step_gives_back_a_cache_of_the_same_shapes_and_one_token_a_row(release):
    _, lowered, (_, state, _), _ = release
    structure = jax.tree.structure((state, output_structure(StepOptions())))
    new_state, out = jax.tree.unflatten(structure, lowered.out_info)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, new_state, state)
    assert all(jax.tree.leaves(same))
    assert out.draw.token.shape == (TAKEN, 1) and out.draw.token.dtype == jnp.int32
    assert out.top_ids.shape == (TAKEN, 1, 0)


def test_every_argument_and_result_has_its_sharding_written_down(release, mesh):
    _, lowered, arguments, _ = release
    everywhere = NamedSharding(mesh, PartitionSpec())
    assert all(leaf.sharding == everywhere for leaf in lowered.out_info)
    header = lowered.as_text().partition(") -> (")[0]
    assert header.count("%arg") == header.count("sdy.sharding = #sdy.sharding<@mesh")
    used = len(jax.tree.leaves(arguments))
    assert header.count("%arg") == used, "an argument is not used by the step"


def test_a_kept_step_is_read_instead_of_traced_and_donates_the_same(mesh, tmp_path, monkeypatch):
    net = network("tiny")
    arguments = abstract_arguments(net)
    options = {"bucket": BUCKET, "options": StepOptions(), "kept": tmp_path}
    first = lower_step(net, mesh, arguments, **options)
    (file,) = tmp_path.iterdir()
    assert file.suffix == ".stablehlo"
    monkeypatch.setattr("deepinfer_jax.runner.compile.step", None)
    again = lower_step(net, mesh, arguments, **options)
    assert again.as_text() == first.as_text()
    params, cache, inputs = donated(again, arguments)
    assert all(cache) and not any(params) and not any(inputs)
    header = again.as_text().partition(") -> (")[0]
    assert header.count("tf.aliasing_output") == len(cache)
    assert list(tmp_path.iterdir()) == [file]


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


@pytest.mark.usefixtures("compilation_cache")
def test_a_folder_below_the_home_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert keep_compiled(Path("~/programs")) == tmp_path / "programs" / cache_key()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        keep_compiled(tmp_path / "file")
    assert str(caught.value) == (
        f"The folder for compiled programs, {tmp_path / 'file'}, cannot be written "
        "(NotADirectoryError: Not a directory). "
        "A program that is not kept would be compiled again at every start. "
        "Set engine.compile_cache_dir to a folder that can be written, or leave it out."
    )


def test_the_key_names_the_version_and_is_stable():
    assert cache_key() == cache_key()
    assert cache_key().startswith(f"jax-{jax.__version__}-")
