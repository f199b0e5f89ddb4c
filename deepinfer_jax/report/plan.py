"""What an engine holds in memory, in bytes, by part. It follows from shapes: no weight is read."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError, MemoryPlanError
from deepinfer_jax.model.cache import BACKTRACK, PAGE, pages_of
from deepinfer_jax.model.params import ParamSpec, param_specs
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.report.temporaries import step_temporaries
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.step import init_state
from deepinfer_jax.settings import EngineConfig

PACKED = {"q8": (1, 1024), "q4": (2, 32), "table": (1, 32)}
"""Weights that share a byte of codes, and a byte of scales, in each packed format."""

_F32 = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one engine on its device.

    Attributes:
        weights: parameters without the Engram tables, rotary tables among them.
        engram_tables: tables in the device's memory, which on a CPU is also the host's; 0 when
            they are elsewhere or on disk.
        windows: window rings of all layers and slots, those of the draft stages among them.
        entries, index_keys: the pages, of all kv sources.
        draft_logprobs: what each slot's drafts were drawn from, which `rejection`, `block` and
            the original's rule compare with the target's: float32 [slots, drafts, vocab].
        slot_state: raw compressor rows, look-back ids, page tables, lengths and drafts.
        step: what the largest step program needs besides: its input and its temporaries. An
            estimate, see `report.temporaries`; all other parts are exact.
        slots, positions: sequences at a time, and the longest of them in tokens.
        rows: tokens of one step at most.
        pages: of `page` tokens each, without the one that belongs to nobody.
        drafts: tokens of a sequence that a step verifies at most.
        backtrack: positions that rings keep beyond their window.
        free: what the device could still give before the weights were loaded; None when unknown.
    """

    weights: int
    engram_tables: int
    windows: int
    entries: int
    index_keys: int
    slot_state: int
    step: int
    draft_logprobs: int = 0
    slots: int
    positions: int
    rows: int
    pages: int
    page: int = PAGE
    drafts: int = 0
    backtrack: int = BACKTRACK
    free: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, under the names that tables and messages show."""
        return {
            "weights": self.weights,
            "Engram tables": self.engram_tables,
            "window rings": self.windows,
            "main KV pages": self.entries,
            "index key pages": self.index_keys,
            "other slot state": self.slot_state,
            **({"draft log-probs": self.draft_logprobs} if self.drafts else {}),
            "step": self.step,
        }

    def as_json(self) -> dict[str, Any]:
        """Bytes by part and sizes, as plain JSON values."""
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        free = sizes.pop("free")
        left = None if free is None else free - self.total
        return sizes | {"total": self.total, "free": free, "left": left, "fits": self.fits}

    @property
    def cache(self) -> int:
        """All state of the sequences."""
        states = self.slot_state + self.draft_logprobs
        return self.windows + self.entries + self.index_keys + states

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

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


def memory_plan(
    net: Network,
    engine: EngineConfig,
    positions: int,
    *,
    free: int | None,
    outside: int = 0,
    drafts: int = 0,
) -> MemoryPlan:
    """The plan of these sizes, whether it fits or not.

    Args:
        net: whose weights and caches are counted.
        engine: its formats and sizes; `positions` stands for `max_model_len`.
        positions: longest sequence in tokens.
        free: bytes that there are, None when unknown.
        outside: bytes of Engram tables that are not parameters and lie in the same memory when
            they are held on the host.
        drafts: tokens of a sequence that a step verifies at most.
    """
    slots = engine.max_num_seqs
    held, tables = _parameters(net, engine.weights, engine.engram == "device")
    pages = slots * pages_of(positions) if engine.pages is None else engine.pages
    backtrack, compared = engine.backtracking(drafts), engine.rule != "coupled"
    state = jax.eval_shape(
        lambda: init_state(
            net,
            slots=slots,
            positions=positions,
            pages=1 + pages,
            drafts=drafts,
            compared=compared,
            backtrack=backtrack,
        )
    )
    cache = state.cache
    logprobs = 0 if state.drafts is None else nbytes(state.drafts.logprobs)
    windows = nbytes((cache.window, cache.draft))
    entries = sum(nbytes(source.entries) for source in cache.sources)
    index_keys = sum(nbytes(source.index_keys) for source in cache.sources)
    others = nbytes(cache) - windows - entries - index_keys
    # A row for every token that may be verified, and one for a prompt.
    rows = max(engine.max_num_batched_tokens, slots * (1 + drafts) + 1)
    temporaries = step_temporaries(
        net,
        packed=engine.weights == "packed",
        rows=rows,
        parts=slots,
        slots=slots,
        positions=positions,
        backtrack=backtrack,
        drafts=drafts,
        compared=compared,
    )
    angles = 2 * net.config.qk_rope_head_dim * _F32.itemsize  # of one position, both tables
    return MemoryPlan(
        weights=held + positions * angles,
        engram_tables=tables + (outside if engine.engram == "host" else 0),
        windows=windows,
        entries=entries,
        index_keys=index_keys,
        slot_state=others + nbytes(state.replace(cache=None)) - logprobs,
        draft_logprobs=logprobs,
        step=temporaries + _input(net, engine, rows, positions),
        slots=slots,
        positions=positions,
        rows=rows,
        pages=pages,
        drafts=drafts,
        backtrack=backtrack,
        free=free,
    )


def page_updates(slots: int, positions: int) -> int:
    """Page-table entries that one step can send: one for each slot, and a whole table besides."""
    return slots + 1 + pages_of(positions)


def out_of_memory(error: BaseException, plan: MemoryPlan) -> MemoryPlanError | None:
    """The refusal that stands for an allocation that failed in spite of the plan, or None.

    Args:
        error: what a launch or a transfer raised.
        plan: of the engine.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in str(error):
        return None
    asked = re.search(r"allocat\w+ (\d+) ?bytes", str(error))
    tried = f" while it tried to allocate {int(asked[1]):,} bytes" if asked else ""
    planned = f"{size_text(plan.total)} were planned"
    if plan.free is not None:
        planned += f" of {size_text(plan.free)} that were free"
    return MemoryPlanError(
        f"The device ran out of memory{tried}; {planned}.",
        told(plan),
        "Free what else uses the device, or lower engine.max_num_seqs, engine.max_model_len or "
        "engine.max_num_batched_tokens; `deepinfer plan` shows what each takes.",
    )


def size_text(count: int) -> str:
    """Bytes in GiB, or in MiB below one."""
    return f"{count / 2**30:.3f} GiB" if count >= 2**30 else f"{count / 2**20:.3f} MiB"


def told(plan: MemoryPlan) -> str:
    """A plan's parts in one sentence."""
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in plan.parts.items())
    drafted = f" with {plan.drafts} drafts each" if plan.drafts else ""
    return (
        f"It is made of {parts}, for {plan.slots} sequences of {plan.positions} tokens{drafted}, "
        f"{plan.pages} pages and steps of {plan.rows} tokens."
    )


def _input(net: Network, engine: EngineConfig, rows: int, positions: int) -> int:
    """Bytes of a step's plan, and of Engram rows that the host looks up."""
    c, slots = net.config, engine.max_num_seqs
    bucket = Bucket(rows, rows, slots, page_updates(slots, positions))
    size = (bucket.ints + 2 * slots) * _F32.itemsize
    if engine.engram != "device":
        width = c.engram_columns * c.engram_head_dim
        size += len(c.engram_layer_ids) * rows * width * np.dtype(net.arithmetic.dtype).itemsize
    return size


def _parameters(net: Network, formats: str, tables: bool) -> tuple[int, int]:
    """Bytes of the parameters without rotary tables: (all but Engram tables, Engram tables)."""
    dtype = np.dtype(net.arithmetic.dtype)
    specs = param_specs(net.config, tables=tables, drafter=net.drafter)
    engram = stored_bytes(specs.engram_tables, formats, dtype)
    token_map = net.config.vocab_size * np.dtype(np.int32).itemsize
    return stored_bytes(specs, formats, dtype) - engram + token_map, engram
