"""What an engine holds in memory, in bytes, by part, and how long its sequences may be for it.

All of it follows from shapes: no weight is read.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError, MemoryPlanError
from deepinfer_jax.model.params import ParamSpec, param_specs
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.runner.step import init_state
from deepinfer_jax.settings import EngineConfig

PACKED = {"q8": (1, 1024), "q4": (2, 32), "table": (1, 32)}
"""Weights that share a byte of codes, and a byte of scales, in each packed format."""

_SPARE = 10  # one part in so many is left to what a step itself needs
_GRAIN = 256  # tokens
_F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one engine on its device.

    Attributes:
        weights: parameters without the Engram tables.
        engram_tables: tables in the device's memory, which on a CPU is also the host's; 0 when
            they are elsewhere or on disk.
        cache: all slots together.
        slots, positions: sequences at a time, and the longest of them in tokens.
        free: what the device could still give before the weights were loaded; None when unknown.
    """

    weights: int
    engram_tables: int
    cache: int
    slots: int
    positions: int
    free: int | None

    @property
    def total(self) -> int:
        """All parts together."""
        return self.weights + self.engram_tables + self.cache

    @property
    def fits(self) -> bool | None:
        """Whether the parts fit into what was free; None when that is unknown."""
        return None if self.free is None else self.total <= self.free


def nbytes(tree: Any) -> int:
    """Bytes of all arrays, or abstract arrays, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def stored_bytes(specs: Any, formats: str, dtype: np.dtype) -> int:
    """Bytes of the leaves of a tree of specs, `packed` or else in `dtype` (float32 where fixed)."""

    def size(spec: ParamSpec) -> int:
        count = math.prod(spec.full_shape)
        if formats == "packed" and spec.stored in PACKED:
            codes, scale = PACKED[spec.stored]
            return count // codes + count // scale
        return count * (_F32 if spec.stored == "f32" else dtype).itemsize

    return sum(map(size, jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))))


def max_length(engine: EngineConfig, config: ModelConfig) -> int:
    """The longest sequence in tokens: as asked, at most what the model was made for."""
    limit = config.max_position_embeddings
    if engine.max_model_len is None:
        return limit
    if engine.max_model_len > limit:
        raise ConfigError(
            f"engine.max_model_len is {engine.max_model_len}; the model's limit is {limit}.",
            "Beyond its limit the rotary tables were never trained.",
            f"Set it to at most {limit}, or leave it out.",
        )
    return engine.max_model_len


def fitting_plan(
    network: Network,
    engine: EngineConfig,
    *,
    token_map: np.ndarray,
    outside: int = 0,
    free: int | None,
) -> MemoryPlan:
    """The plan to run: as asked, or as long as memory holds when no length was asked for.

    A length that is chosen here leaves a tenth of the memory to what a step itself needs.

    Args:
        network: whose weights and caches are counted.
        engine: its formats and sizes.
        token_map: int32 [vocab].
        outside: bytes of Engram tables that are not parameters and lie in the same memory.
        free: bytes that there are; None leaves the check out.

    Raises:
        MemoryPlanError: no such plan fits; its advice is sizes that do.
        ConfigError: a length beyond the model's.
    """
    plan = _planner(network, engine, token_map, outside, free)
    slots, limit = engine.max_num_seqs, max_length(engine, network.config)
    wanted = plan(slots, limit)
    if free is None:
        return wanted
    room = free - free // _SPARE
    if wanted.total <= (room if engine.max_model_len is None else free):
        return wanted
    if engine.max_model_len is None:
        # Coarse, so that programs kept for one length serve the next start too.
        blocks = _most(limit // _GRAIN, lambda n: plan(slots, n * _GRAIN).total <= room)
        if blocks:
            return plan(slots, blocks * _GRAIN)
    raise MemoryPlanError(
        f"The engine needs {_gib(wanted.total)} ({wanted.total:,} bytes), and {_gib(free)} are "
        "available.",
        f"Weights take {_gib(wanted.weights)}, Engram tables {_gib(wanted.engram_tables)}, and "
        f"the caches of {slots} sequences of {limit} tokens {_gib(wanted.cache)}.",
        _advice(engine, wanted, plan, room),
    )


def _planner(
    network: Network,
    engine: EngineConfig,
    token_map: np.ndarray,
    outside: int,
    free: int | None,
) -> Callable[[int, int], MemoryPlan]:
    """What would be held, as a function of slots and positions."""
    config, dtype = network.config, np.dtype(network.arithmetic.dtype)
    specs = param_specs(config, tables=engine.engram == "device")
    tables = stored_bytes(specs.engram_tables, engine.weights, dtype)
    weights = stored_bytes(specs, engine.weights, dtype) - tables + token_map.nbytes
    pages = None if engine.pages is None else 1 + engine.pages
    angles = 2 * config.qk_rope_head_dim * _F32.itemsize  # of one position, both tables

    def plan(slots: int, positions: int) -> MemoryPlan:
        state = jax.eval_shape(
            lambda: init_state(network, slots=slots, positions=positions, pages=pages)
        )
        held = weights + positions * angles
        return MemoryPlan(held, tables + outside, nbytes(state), slots, positions, free)

    return plan


def _advice(
    engine: EngineConfig, wanted: MemoryPlan, plan: Callable[[int, int], MemoryPlan], room: int
) -> str:
    """What to change so that the plan fits `room`."""
    if plan(1, 1).total > room:
        ways = []
        if engine.weights != "packed":
            ways.append("keep the weights packed (engine.weights=packed)")
        if wanted.engram_tables:
            ways.append("leave the Engram tables on disk (engine.engram=mmap)")
        text = ", or ".join([*ways, "run where there is more memory"])
        return f"{text[0].upper()}{text[1:]}."
    slots, positions = wanted.slots, wanted.positions
    length = _most(positions, lambda n: plan(slots, n).total <= room)
    count = _most(slots, lambda n: plan(n, positions).total <= room)
    ways = []
    if length:
        ways.append(f"engine.max_model_len to at most {length}")
    if count:
        ways.append(f"engine.max_num_seqs to at most {count}")
    if not ways:
        alone = _most(positions, lambda n: plan(1, n).total <= room)
        ways.append(f"engine.max_num_seqs to 1 and engine.max_model_len to at most {alone}")
    return f"Set {', or '.join(ways)}."


def _most(n: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to n that fits, where all below one that fits do too; 0 if none does."""
    return bisect.bisect_right(range(1, n + 1), False, key=lambda i: not fits(i))


def _gib(count: int) -> str:
    return f"{count / 2**30:.3f} GiB"
