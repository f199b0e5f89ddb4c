"""Operations of one token's weights: of a whole forward, and of what bounded replay leaves out.

Two operations per active weight. Attention over cached keys comes on top and depends on the
position; it is not counted.
"""

import math
from typing import Any

import jax

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.params import Layer, ParamSpec, layer_specs
from deepinfer_jax.model.transformer import decoder_start


def _active(specs: Any, config: ModelConfig) -> int:
    """Weights of one layer that a token meets: of the experts, those that it is routed to."""

    def size(spec: ParamSpec) -> int:
        return math.prod(spec.shape) * (config.num_experts_per_tok if spec.experts else 1)

    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))
    return sum(size(spec) for spec in leaves)


def active_parameters(config: ModelConfig) -> tuple[int, int]:
    """Weights that a token meets: (in all layers and the head, where the decoder leaves it out).

    A token that is left out still passes the compressor and the index keys of the decoder's first
    layer (model specification, "CED").
    """
    layers: list[Layer] = [layer_specs(config, (plan,)) for plan in config.layers]
    head = config.vocab_size * config.hidden_size + config.hidden_size
    whole = sum(_active(layer, config) for layer in layers) + head
    first = decoder_start(config)
    short = sum(_active(layer, config) for layer in layers[:first])
    if first < len(layers):
        source = layers[first]
        keys = None if source.indexer is None else (source.indexer.wk, source.indexer.k_norm)
        short += _active((source.attn_norm, source.compressor, keys), config)
    return whole, short


def skipped_flops(config: ModelConfig, rows: int) -> int:
    """Operations that were left out with `rows` prompt tokens that the decoder did not run."""
    whole, short = active_parameters(config)
    return 2 * rows * (whole - short)
