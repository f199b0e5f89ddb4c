"""The drafters' losses and training metrics, as functions of draft and target logits.

All are float32 at temperature 1. c* = 1 - 1/2 ||q - p||_1 is the probability that a draft drawn
from q is accepted by a target p (drafting specification, "DSpark / DFlash training step").
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.training.losses import cross_entropy

_EPS = 1e-6


@dataclass(frozen=True)
class LossWeights:
    """Weights of the parts, and how fast later slots lose weight.

    Attributes:
        ce, tv, confidence: of cross-entropy, total variation and the confidence's cross-entropy.
        decay: slot k weighs exp(-k / decay).
    """

    ce: float
    tv: float
    confidence: float
    decay: float = 4.0


DSPARK = LossWeights(ce=0.1, tv=0.9, confidence=1.0)
DFLASH = LossWeights(ce=1.0, tv=0.0, confidence=0.0)


def slot_weights(valid: jax.Array, decay: float) -> jax.Array:
    """float32 [..., g]: exp(-k / decay) where bool `valid` [..., g], else 0."""
    k = jnp.arange(valid.shape[-1], dtype=jnp.float32)
    return jnp.where(valid, jnp.exp(-k / decay), 0.0)


def distance(logits: jax.Array, target: jax.Array) -> jax.Array:
    """||softmax(logits) - softmax(target)||_1 over the last axis, float32 [...]."""
    gap = jax.nn.softmax(logits, axis=-1) - jax.nn.softmax(target, axis=-1)
    return jnp.sum(jnp.abs(gap), axis=-1)


def acceptance(l1: jax.Array) -> jax.Array:
    """c* of `distance`, in 0..1, without a gradient."""
    return jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * l1, 0.0, 1.0))


def block_loss(
    logits: jax.Array,
    target: jax.Array,
    confidence: jax.Array | None,
    labels: jax.Array,
    valid: jax.Array,
    weights: LossWeights,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a batch of blocks, and its parts.

    Args:
        logits: float32 [b, a, g, v], of the drafter.
        target: float32 [b, a, g, v], of the target at the same slots; gets no gradient.
        confidence: float32 [b, a, g], logits of the confidence head; None without one.
        labels: int32 [b, a, g]. valid: bool [b, a, g].
        weights: of the parts.

    Returns:
        The loss, and its parts ce, tv, and confidence (with a head), each a weighted mean, together
        with `acceptance`, c* float32 [b, a, g].
    """
    target = jax.lax.stop_gradient(target)
    w = slot_weights(valid, weights.decay)
    total = jnp.sum(w) + _EPS
    flat = (-1, logits.shape[2], logits.shape[3])
    ce, _ = cross_entropy(logits.reshape(flat), labels.reshape(-1, labels.shape[2]))
    l1 = distance(logits, target)
    accepted = acceptance(l1)
    parts = {
        "ce": jnp.sum(w * ce.reshape(w.shape)) / total,
        "tv": jnp.sum(w * l1) / total,
    }
    loss = weights.ce * parts["ce"] + weights.tv * parts["tv"]
    if confidence is not None:
        # -(c log s(g) + (1 - c) log(1 - s(g))) for the logistic s
        bce = jax.nn.softplus(confidence) - accepted * confidence
        parts["confidence"] = jnp.sum(w * bce) / total
        loss = loss + weights.confidence * parts["confidence"]
    return loss, parts | {"acceptance": accepted}


def metric_sums(
    accepted: jax.Array, confidence: jax.Array | None, valid: jax.Array
) -> dict[str, jax.Array]:
    """Sums from which `metrics` makes means; those of several batches may be added.

    Args:
        accepted: c* float32 [..., g]. confidence: logits float32 [..., g], or None.
        valid: bool [..., g].
    """
    axes = tuple(range(valid.ndim - 1))
    e = valid.astype(jnp.float32)
    survives = jnp.cumprod(accepted * e, axis=-1)
    sums = {
        "slots": jnp.sum(e, axis=axes),
        "accepted": jnp.sum(accepted * e, axis=axes),
        "survives": jnp.sum(survives),
    }
    if confidence is not None:
        trust = jax.nn.sigmoid(confidence)
        sums |= {
            "error": jnp.sum(jnp.abs(trust - accepted) * e),
            "bias": jnp.sum((trust - accepted) * e),
            "cumprod_bias": jnp.sum((jnp.cumprod(trust * e, axis=-1) - survives) * e),
        }
    return jax.lax.stop_gradient(sums)


def metrics(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Training metrics of `metric_sums`.

    accept_rate@k: mean c* of slot k (from 1) over valid slots. tau_probabilistic: 1 + the sum over
    slots of the product of c* so far, a mean over blocks with a valid slot; a slot that is not
    valid ends its block, as the end of a turn ends a step. confidence_abs_error, confidence_bias,
    confidence_cumprod_bias: means over valid slots of |s - c*|, s - c*, and the difference of
    their running products; s is the confidence. What has no valid slot gives no number.
    """
    slots = np.asarray(sums["slots"], np.float64)
    accepted = np.asarray(sums["accepted"], np.float64)
    found = {f"accept_rate@{k + 1}": accepted[k] / n for k, n in enumerate(slots) if n}
    if slots[0]:
        found["tau_probabilistic"] = 1 + float(sums["survives"]) / slots[0]
        for name in ("error", "bias", "cumprod_bias"):
            if name in sums:
                label = "confidence_abs_error" if name == "error" else f"confidence_{name}"
                found[label] = float(sums[name]) / slots.sum()
    return {name: float(value) for name, value in found.items()}
