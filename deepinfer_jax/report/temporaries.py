"""What a step program needs besides its arguments, in bytes, from shapes alone.

An estimate of what XLA allocates, and the one part of a memory plan that is no exact count. XLA's
own figure is `memory_analysis().temp_size_in_bytes` of the compiled program; for the tiny and nano
networks on a CPU the two differ by less than a tenth of the whole.
"""

import math
from typing import Any

import jax
import numpy as np

from deepinfer_jax.model.cache import BACKTRACK, PAGE, pages_of
from deepinfer_jax.model.params import Drafter, Layer, ParamSpec, drafter_specs, param_specs
from deepinfer_jax.model.transformer import Network
from deepinfer_jax.ops.sparse_mla import TILE

_F32 = 4
_CODES_EXPANDED = 2  # bytes of a code that XLA expands ahead of a loop over layers
_LOGITS = 8  # arrays of the vocabulary's width that a draw holds at the same time, for each row
_STREAMS = 3  # residual streams, float32: before and after a sublayer, and the Engram's


def step_temporaries(
    net: Network,
    *,
    packed: bool,
    rows: int,
    parts: int,
    slots: int,
    positions: int,
    backtrack: int = BACKTRACK,
    drafts: int = 0,
    compared: bool = False,
) -> int:
    """Bytes that one step holds while it runs.

    Args:
        net: configuration, arithmetic and kernels.
        packed: weights stay in their stored formats and are expanded where they are used.
        rows, parts: of the step: tokens, and sequences that draw.
        slots, positions: of the caches: sequences, and the longest of them in tokens.
        backtrack: positions that rings keep beyond their window.
        drafts: tokens of a sequence that are verified at most.
        compared: verification compares with the law that drafts were drawn from.
    """
    b = np.dtype(net.arithmetic.dtype).itemsize
    drafter = drafter_specs(net.config) if drafts else None
    layers = _activations(net, rows, slots, positions, backtrack)
    laws = parts * drafts if compared else 0
    drawn = _LOGITS * min(rows, parts * (1 + drafts)) + laws
    runs = [run for run in param_specs(net.config, tables=False).runs if _length(run) > 1]
    copied = max((_one_layer(run, packed, b) for run in runs), default=0)
    logits = net.config.vocab_size * _F32
    if drafter is None:
        return max(layers, drawn * logits) + copied + _weights(net, packed, None)
    held, block = _draft_activations(net, rows, parts)
    base = parts * (net.config.dspark_block_size + drafts + _LOGITS) + 2 * laws
    verifying = max(layers + held, drawn * logits) + copied
    proposing = held + block + base * logits
    return max(verifying, proposing) + _weights(net, packed, drafter)


def _activations(net: Network, n: int, slots: int, positions: int, backtrack: int) -> int:
    """Bytes while the layers run.

    XLA makes the result arrays of all loops over rows before the first layer: one a layer for the
    experts and one for attention, and one of index scores for each index source. A run of layers
    that is a loop itself needs its own once.
    """
    c, b = net.config, np.dtype(net.arithmetic.dtype).itemsize
    d, k, heads = c.hidden_size, c.head_dim, c.num_attention_heads * c.head_dim
    loops = sum(len(run) == 1 for run in c.runs) + any(len(run) > 1 for run in c.runs)
    tiled = net.ops.sparse_mla.name == "tiles" and min(n, c.sliding_window) >= TILE
    entries = pages_of(positions) * PAGE
    scores = sum(entries // plan.ratio for plan in c.layers if plan.owns_index)
    ring = c.sliding_window + backtrack
    keys = (TILE if tiled else n) * (c.sliding_window + c.index_topk)
    return (
        loops * n * (c.num_experts_per_tok * d * _F32 + tiled * heads * b)
        + n * scores * _F32
        + _STREAMS * n * c.hc_mult * d * _F32
        + len(c.engram_layer_ids) * n * (c.hc_mult + 1) * d * b
        + n * (heads + c.index_n_heads * c.index_head_dim) * b
        + (keys + n + slots * ring) * k * b
    )


def _draft_activations(net: Network, n: int, parts: int) -> tuple[int, int]:
    """Bytes of the drafter's activations: (while the layers run too, while a block runs).

    What is read of the step's n rows is there while the layers run, and so are the arrays of the
    drafter's loops. The rest is there while a block of each part runs.
    """
    c, b = net.config.of_stages, np.dtype(net.arithmetic.dtype).itemsize
    d, rows = c.hidden_size, parts * c.dspark_block_size
    heads = c.num_attention_heads * c.head_dim
    read = (len(c.dspark_target_layer_ids) + 1) * d + len(c.stages) * c.head_dim
    held = n * read * b + len(c.stages) * rows * c.num_experts_per_tok * d * _F32
    keys = parts * (c.sliding_window + c.dspark_block_size) * c.head_dim
    return held, rows * c.hc_mult * d * _F32 + (rows * (2 * heads + d) + keys) * b


def _weights(net: Network, packed: bool, drafter: Drafter | None) -> int:
    """Bytes of weights in another form than the one they are held in.

    The copies that loops over like layers make are not among them.
    """
    c, b = net.config, np.dtype(net.arithmetic.dtype).itemsize
    d = c.hidden_size
    total = 4 * c.moe_intermediate_size * d * b  # one expert, taken from its stack
    if b != _F32:
        # These products are taken in float32.
        total += (c.vocab_size + len(c.runs) * c.n_routed_experts) * d * _F32
    layers = list(param_specs(c, tables=False).runs)
    if drafter is not None:
        layers += drafter.stages
        if b != _F32:
            rank, experts = c.dspark_markov_rank, c.dspark_n_routed_experts
            total += (c.vocab_size * rank + experts * d) * _F32
        if packed:
            total += math.prod(drafter.main_proj.full_shape) * b
    if packed:
        for run in layers:
            size = b if _length(run) == 1 else _CODES_EXPANDED
            total += sum(math.prod(s.full_shape) for s in _specs(run) if _expanded(s)) * size
    return total


def _one_layer(run: Layer, packed: bool, b: int) -> int:
    """Bytes of the copy that a loop over like layers makes of the layer it is at."""

    def size(spec: ParamSpec) -> int:
        if packed and spec.stored == "q4":
            return math.prod(spec.full_shape) // 2 + math.prod(spec.full_shape) // 32
        return math.prod(spec.full_shape) * (_F32 if spec.stored == "f32" else b)

    return sum(map(size, _specs(run))) // _length(run)


def _specs(run: Layer) -> list[ParamSpec]:
    return jax.tree.leaves(run, is_leaf=lambda x: isinstance(x, ParamSpec))


def _length(run: Any) -> int:
    return len(run.attn_norm.layers)


def _expanded(spec: ParamSpec) -> bool:
    """Whether a packed weight is expanded as a whole; experts are expanded one at a time."""
    return spec.stored == "q8"
