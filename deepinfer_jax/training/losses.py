"""The training objective: weighted next-token cross-entropy, index loss, and z-loss."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.engram import table_rows
from deepinfer_jax.training.forward import ForwardOptions, ForwardResult, forward
from deepinfer_jax.training.quantize import round_weights
from deepinfer_jax.training.settings import TrainingSettings

Arrays = Mapping[str, jax.Array]


def targets(ids: jax.Array, decoder_start: int) -> jax.Array:
    """The next token of every column from `decoder_start`, int32 [b, r]; the last one has none."""
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))[:, decoder_start:]


def cross_entropy(logits: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-probability of `target` and the log-partition, float32 [b, r].

    logits float32 [b, r, v], target int32 [b, r].
    """
    partition = jax.nn.logsumexp(logits, axis=-1)
    # A comparison fuses with the exponentials; a gather's gradient would scatter into [b, r, v].
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.sum(jnp.where(index == target[..., None], logits, 0.0), axis=-1)
    return partition - chosen, partition


def run_forward(
    weights: Arrays,
    batch: Arrays,
    config: ModelConfig,
    options: ForwardOptions,
    token_map: np.ndarray,
    sparse: bool | jax.Array,
) -> ForwardResult:
    """The forward of a batch (`ids`, `segment` int32 [b, t]), with hashes made on the device.

    With `options.quantize_caches` the weights are rounded too.
    """
    if options.quantize_caches:
        weights = round_weights(weights, config)
    hashes = table_rows(token_map, batch["ids"], batch["segment"], config)
    return forward(weights, batch["ids"], batch["segment"], hashes, config, options, sparse)


def objective(
    weights: Arrays,
    batch: Arrays,
    totals: Arrays,
    config: ModelConfig,
    settings: TrainingSettings,
    options: ForwardOptions,
    token_map: np.ndarray,
    sparse: bool | jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This shard's part of the loss, and what a log line needs.

    Args:
        weights: float32 masters.
        batch: ids, segment, skill int32 and weight float32, [b, t].
        totals: `weight` and `rows` over all shards, so that the parts add up to the mean.
        config, settings, options, token_map, sparse: as elsewhere.

    Returns:
        The loss, and: answer, index, z (parts of it); correct bool [b, r]; peak [layers, heads],
        index_peak, load [layers, experts].
    """
    result = run_forward(weights, batch, config, options, token_map, sparse)
    target = targets(batch["ids"], options.decoder_start)
    loss, partition = cross_entropy(result.logits, target)
    weight = batch["weight"][:, options.decoder_start :] / totals["weight"]
    answer = jnp.sum(loss * weight)
    z = jnp.sum(jnp.square(partition) * weight)
    index = result.index_loss / totals["rows"]
    total = answer + settings.z_weight * z + settings.index_weight * index
    report = {
        "answer": answer,
        "index": index,
        "z": z,
        "correct": jnp.argmax(result.logits, axis=-1).astype(jnp.int32) == target,
        "peak": result.attention_peak,
        "index_peak": result.index_peak,
        "load": result.load,
    }
    return total, jax.lax.stop_gradient(report)


def options_for(
    settings: TrainingSettings, *, bfloat16: bool, kernel: bool, decoder_start: int, quantize: bool
) -> ForwardOptions:
    """Forward options of a short (`decoder_start` 0) or long step."""
    options = ForwardOptions(bfloat16=bfloat16, kernel=kernel, quantize_caches=quantize)
    chunk = settings.long_chunk if decoder_start else settings.chunk
    return replace(options, decoder_start=decoder_start, chunk=chunk)
