"""Compiled programs: the one place that calls `jax.jit`, with shardings written down.

A program is compiled ahead of its first use from abstract shapes. Its executable is kept in a
folder keyed by what decides machine code: JAX's version, the platform and the processor's features.
"""

import hashlib
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.files import replacing
from deepinfer_jax.model.transformer import Network, forward, unembed
from deepinfer_jax.ops.device import devices
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.slots import PAGES, put, take
from deepinfer_jax.runner.step import StepOptions, output_structure, step

# XLA may keep bfloat16 intermediates in float32, which would skip roundings that the arithmetic
# `release` defines.
_STRICT_ROUNDING = {"xla_allow_excess_precision": False}


def one_device_mesh(device: Any = None) -> Mesh:
    """A mesh of one device with the axis `data`: the layout of a single chip."""
    device = device or devices()[0]
    return jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=[device])


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device of `mesh` holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """Shapes and dtypes of `tree`'s arrays, placed as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def _jit(function: Callable[..., Any], net: Network, mesh: Mesh, donate: tuple[int, ...]) -> Any:
    whole = replicated(mesh)
    options = _STRICT_ROUNDING if net.arithmetic.name.startswith("release") else None
    return jax.jit(
        function,
        in_shardings=whole,
        out_shardings=whole,
        donate_argnums=donate,
        compiler_options=options,
    )


def lower_step(
    net: Network,
    mesh: Mesh,
    arguments: tuple[Any, Any, Any],
    *,
    bucket: Bucket,
    options: StepOptions,
    kept: Path | None = None,
) -> jax.stages.Lowered:
    """Lower the step for the shapes of `arguments` (params, state, inputs); no array is read.

    The program takes the leaves of the three, one after the other, donates the state's, and gives
    the leaves of the new state and of `StepOutput`. Every one has its sharding written down.

    `kept` is the folder that `keep_compiled` returned, or None. There the lowered program is kept,
    under a digest of the package's source and of everything that shapes the program, so that a
    later start need not trace it again.
    """
    shapes = abstract(arguments, replicated(mesh))
    leaves, tree = jax.tree.flatten(shapes)
    first = len(jax.tree.leaves(shapes[0]))
    donate = tuple(range(first, first + len(jax.tree.leaves(shapes[1]))))

    # A program is kept without its containers, which have no stored form.
    def flat(*given: Any) -> tuple[Any, ...]:
        out = step(*jax.tree.unflatten(tree, given), net=net, bucket=bucket, options=options)
        return tuple(jax.tree.leaves(out))

    program: Any = _jit(flat, net, mesh, donate)
    if kept is not None:
        # Not the network's own repr: it holds addresses of functions.
        network = (net.config, net.arithmetic, net.ops.device, net.ops.rows(), net.traced)
        what = (network, mesh, bucket, options, tree, leaves)
        path = kept / f"{_digest(source_digest(), *map(repr, what))}.stablehlo"
        program = _jit(_exported(path, program, leaves).call, net, mesh, donate)
    return program.lower(*leaves)


def compile_step(
    net: Network,
    mesh: Mesh,
    arguments: tuple[Any, Any, Any],
    *,
    bucket: Bucket,
    options: StepOptions,
    kept: Path | None = None,
) -> Callable[..., Any]:
    """Compile what `lower_step` lowers, ahead of its use; returns `step` of these arguments."""
    lowered = lower_step(net, mesh, arguments, bucket=bucket, options=options, kept=kept)
    executable = lowered.compile()
    out_tree = jax.tree.structure((arguments[1], output_structure(options)))

    def run(*given: Any) -> Any:
        return jax.tree.unflatten(out_tree, executable(*jax.tree.leaves(given)))

    return run


def compile_moves(mesh: Mesh, state: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`runner.slots.take` and `put`, compiled for a state or its shapes.

    `put` donates the state.
    """
    whole = replicated(mesh)
    state = abstract(state, whole)
    slot, pages = abstract((np.int32(0), np.zeros(PAGES, np.int32)), whole)
    out = jax.jit(take, in_shardings=whole, out_shardings=whole).lower(state, slot, pages)
    held = abstract(jax.eval_shape(take, state, slot, pages), whole)
    back = jax.jit(put, in_shardings=whole, out_shardings=whole, donate_argnums=(0,))
    return out.compile(), back.lower(state, held, slot, pages).compile()


def _exported(path: Path, program: Any, leaves: list[Any]) -> export.Exported:
    """The program from `path`, or lowered now and written there."""
    if path.is_file():
        return export.deserialize(bytearray(path.read_bytes()))
    exported = export.export(program)(*leaves)
    with replacing(path) as temporary:
        temporary.write_bytes(exported.serialize())
    return exported


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def source_digest() -> str:
    """A digest of the package's source: another source may lower to another program."""
    package = Path(__file__).parent.parent
    return _digest(*(path.read_text() for path in sorted(package.rglob("*.py"))))


def trace_program(net: Network, mesh: Mesh) -> Any:
    """The forward with all logits, jitted; arguments (params, cache, rows, memory, injected)."""

    def run(params: Any, cache: Any, rows: Any, memory: Any, injected: Any) -> Any:
        out = forward(params, cache, rows, memory, injected, net=net)
        return out, unembed(params, out.hidden, net)

    return _jit(run, net, mesh, donate=(1,))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, compiled for each shape of its arguments when it is first called."""
    return jax.jit(function)


def cache_key() -> str:
    """What decides machine code, as a short folder name."""
    features = platform.processor() + platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        features += next((line for line in lines if line.startswith("flags")), "")
        features += next((line for line in lines if line.startswith("model name")), "")
    device = devices()[0]
    text = f"{jax.__version__} {device.platform} {device.device_kind} {features}"
    return f"jax-{jax.__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def keep_compiled(folder: Path) -> Path:
    """Keep executables under `folder` (`~` is the home); returns the folder of this machine's kind.

    Raises ConfigError when nothing can be written there.
    """
    place = folder.expanduser() / cache_key()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ConfigError(
            f"The folder for compiled programs, {folder}, cannot be written "
            f"({type(error).__name__}: {error.strerror}).",
            "A program that is not kept would be compiled again at every start.",
            "Set engine.compile_cache_dir to a folder that can be written, or leave it out.",
        ) from error
    if jax.config.jax_compilation_cache_dir != str(place):
        jax.config.update("jax_compilation_cache_dir", str(place))
        compilation_cache.reset_cache()  # JAX opens its first folder once and stays with it
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return place
