"""The attention parts that the drafters share: projections, rotation, masked softmax."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.ops.quant import qdq_fp8
from deepinfer_jax.training.linear import project, rms_norm
from deepinfer_jax.training.quantize import straight_through
from deepinfer_jax.training.rotary import rotate

Weights = Mapping[str, jax.Array]
_HIDDEN = -1e30  # finite, so that a row without keys leaves the whole weight to the sink


def rotate_rows(x: jax.Array, angles: jax.Array, *, inverse: bool = False) -> jax.Array:
    """x [b, t, ..., c] rotated by float32 angles [b, t, 2, rotary / 2], its own for every row."""
    b, t = x.shape[:2]
    flat = rotate(
        x.reshape(1, b * t, *x.shape[2:]), angles.reshape(b * t, *angles.shape[2:]), inverse=inverse
    )
    return flat.reshape(x.shape)


def queries(
    x: jax.Array, weights: Weights, name: str, angles: jax.Array, config: ModelConfig
) -> jax.Array:
    """Rotated queries [b, t, h, c], scaled by c^-0.5, of normed x [b, t, i]."""
    heads, width = config.num_attention_heads, config.head_dim
    qr = project(x, weights[f"{name}.wq_a.weight"], x.dtype, False)
    qr = rms_norm(qr, weights[f"{name}.q_norm.weight"], config.rms_norm_eps)
    q = project(qr, weights[f"{name}.wq_b.weight"], x.dtype, False)
    q = rotate_rows(q.reshape(*x.shape[:2], heads, width), angles)
    return q * jnp.asarray(width**-0.5, x.dtype)


def latents(
    x: jax.Array,
    weights: Weights,
    name: str,
    angles: jax.Array,
    config: ModelConfig,
    *,
    quantize: bool,
) -> jax.Array:
    """Keys, which are also the values, [b, t, c] of x [b, t, i].

    With `quantize` they are rounded as the window cache stores them.
    """
    kv = project(x, weights[f"{name}.wkv.weight"], x.dtype, False)
    kv = rms_norm(kv, weights[f"{name}.kv_norm.weight"], config.rms_norm_eps)
    kv = rotate_rows(kv, angles)
    return straight_through(qdq_fp8, kv) if quantize else kv


def with_sink(
    scores: Sequence[jax.Array], masks: Sequence[jax.Array], sink: jax.Array
) -> list[jax.Array]:
    """Probabilities of several key sets and a sink under one softmax over the last axes.

    Args:
        scores: float32 [..., h, keys], one per key set. masks: bool, broadcast to the scores.
        sink: float32 [h], a logit of each head that takes weight and gives no value.
    """
    shown = [jnp.where(m, s, _HIDDEN) for s, m in zip(scores, masks, strict=True)]
    top = jnp.broadcast_to(sink, scores[0].shape[:-1])
    for part in shown:
        top = jnp.maximum(top, jnp.max(part, axis=-1))
    top = jax.lax.stop_gradient(top)  # it cancels in the quotient
    weighed = [jnp.exp(part - top[..., None]) for part in shown]
    total = jnp.exp(sink - top) + sum(jnp.sum(part, axis=-1) for part in weighed)
    return [part / total[..., None] for part in weighed]


def output(
    o: jax.Array, weights: Weights, name: str, angles: jax.Array, config: ModelConfig
) -> jax.Array:
    """[b, t, d] of head outputs o [b, t, h, c]: rotated back, grouped low-rank projection."""
    b, t = o.shape[:2]
    groups, rank = config.o_groups, config.o_lora_rank
    o = rotate_rows(o, angles, inverse=True).reshape(b, t, groups, -1)
    low = weights[f"{name}.wo_a.weight"].astype(o.dtype).reshape(groups, rank, -1)
    z = jnp.einsum("btgi,gki->btgk", o, low, preferred_element_type=o.dtype)
    return project(z.reshape(b, t, groups * rank), weights[f"{name}.wo_b.weight"], o.dtype, False)
