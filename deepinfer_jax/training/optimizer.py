"""AdamW with what keeps this network stable: clipping, a divergence guard, a query-key clip, and
router biases moved by sign.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.settings import TrainingSettings

_HISTORY = 128  # gradient norms behind the running median
_TRUSTED = 32  # norms before the guard may act


@flax.struct.dataclass
class TrainState:
    """What a step carries.

    Attributes:
        weights: float32 masters by training name.
        m, v: Adam's moments, one flat float32 vector per group of `groups`.
        step: int32, of the whole run.
        since: int32, updates since the optimiser (re)started.
        norms: float32 [128], a ring of gradient norms, infinite where empty.
        seen: int32, finite norms so far.
    """

    weights: dict[str, jax.Array]
    m: dict[str, jax.Array]
    v: dict[str, jax.Array]
    step: jax.Array
    since: jax.Array
    norms: jax.Array
    seen: jax.Array


def groups(weights: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensor names by how they are updated: stream mixes, decayed matrices, and the rest.

    A group is updated as one vector: one kernel each instead of one per tensor.
    """
    names: dict[str, list[str]] = {"mixes": [], "decayed": [], "plain": []}
    for name in sorted(weights):
        matrix = weights[name].ndim >= 2 and not name.endswith((".q_weight", ".k_weight"))
        kind = "decayed" if matrix and "embed." not in name else "plain"
        names["mixes" if ".hc_" in name else kind].append(name)
    return names


def start(weights: Mapping[str, np.ndarray], step: int) -> TrainState:
    """A state with fresh moments at `step` of the run (0, or where a piece continues)."""
    sizes = {g: sum(weights[n].size for n in names) for g, names in groups(weights).items()}
    return TrainState(
        weights={k: jnp.asarray(w, jnp.float32) for k, w in weights.items()},
        m={g: jnp.zeros(size, jnp.float32) for g, size in sizes.items()},
        v={g: jnp.zeros(size, jnp.float32) for g, size in sizes.items()},
        step=jnp.asarray(step, jnp.int32),
        since=jnp.zeros((), jnp.int32),
        norms=jnp.full((_HISTORY,), jnp.inf, jnp.float32),
        seen=jnp.zeros((), jnp.int32),
    )


def learning_rate(
    settings: TrainingSettings, step: jax.Array, since: jax.Array, started: jax.Array
) -> jax.Array:
    """Rate of a step: warm-up, constant, then linear to `lr_final`; float32 scalar.

    `since` counts updates since the optimiser started, `started` is the step it started at: a
    resumed piece warms up again in `rewarm` steps.
    """
    s, n = settings, step.astype(jnp.float32)
    begin = s.decay_from * s.steps
    fall = jnp.clip((n - begin) / max(s.steps - begin, 1.0), 0.0, 1.0)
    rate = s.lr * (1.0 - (1.0 - s.lr_final) * fall)
    warm = (n + 1.0) / max(s.warmup, 1)
    again = (since.astype(jnp.float32) + 1.0) / max(s.rewarm, 1)
    return rate * jnp.minimum(1.0, jnp.minimum(warm, jnp.where(started > 0, again, 1.0)))


def update(
    state: TrainState,
    gradients: Mapping[str, jax.Array],
    peak: jax.Array,
    load: jax.Array,
    config: ModelConfig,
    settings: TrainingSettings,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update.

    Args:
        state: before.
        gradients: float32, the keys of `state.weights`.
        peak: float32 [layers, heads], largest attention logits of this step.
        load: float32 [layers, experts], tokens routed.
        config, settings: numbers.

    Returns:
        The new state and: norm, rate, skipped (1 when the guard held the update back).
    """
    s = settings
    members = groups(state.weights)
    flat = {g: _flat(gradients, names) for g, names in members.items()}
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in flat.values()))
    finite = jnp.isfinite(norm)
    filled = jnp.minimum(state.seen, _HISTORY)
    median = jnp.sort(state.norms)[jnp.maximum(filled // 2, 0)]
    calm = (state.seen < _TRUSTED) | (norm <= s.guard_ratio * median)
    accept = finite & calm
    # Refused norms enter the history as well: a lasting change is accepted after half a ring.
    slot = state.seen % _HISTORY
    norms = jnp.where(finite, state.norms.at[slot].set(norm), state.norms)
    rate = learning_rate(s, state.step, state.since, state.step - state.since)
    factor = jnp.where(accept, jnp.minimum(1.0, s.clip / jnp.maximum(norm, 1e-12)), 0.0)
    count = (state.since + 1).astype(jnp.float32)
    m_scale = 1.0 / (1.0 - s.b1**count)
    v_scale = 1.0 / (1.0 - s.b2**count)
    weights: dict[str, jax.Array] = {}
    m, v = {}, {}
    for group, names in members.items():
        # A gradient that is not finite must not reach the moments even times zero.
        g = jnp.where(accept, flat[group] * factor, 0.0)
        old = _flat(state.weights, names)
        m_new = s.b1 * state.m[group] + (1 - s.b1) * g
        v_new = s.b2 * state.v[group] + (1 - s.b2) * jnp.square(g)
        move = m_new * m_scale / (jnp.sqrt(v_new * v_scale) + s.eps)
        if group == "decayed":
            move = move + s.weight_decay * old
        own = rate * (s.hc_rate if group == "mixes" else 1.0)
        new = jnp.where(accept, old - own * move, old)
        m[group] = jnp.where(accept, m_new, state.m[group])
        v[group] = jnp.where(accept, v_new, state.v[group])
        ends = np.cumsum([state.weights[n].size for n in names]).tolist()
        for name, part in zip(names, jnp.split(new, ends[:-1]), strict=True):
            weights[name] = part.reshape(state.weights[name].shape)
    _clip_queries(weights, peak, accept, config, s.logit_cap)
    _balance(weights, load, accept, s.bias_rate)
    after = dataclasses.replace(
        state,
        weights=weights,
        m=m,
        v=v,
        step=state.step + 1,
        since=state.since + 1,
        norms=norms,
        seen=state.seen + finite.astype(jnp.int32),
    )
    skipped = 1.0 - accept.astype(jnp.float32)
    return after, {"norm": norm, "rate": rate, "skipped": skipped}


def _flat(tensors: Mapping[str, jax.Array], names: list[str]) -> jax.Array:
    return jnp.concatenate([tensors[n].reshape(-1) for n in names])


def _clip_queries(
    weights: dict[str, jax.Array],
    peak: jax.Array,
    accept: jax.Array,
    config: ModelConfig,
    cap: float,
) -> None:
    """Shrink the query rows of heads whose largest logit passed `cap`: q has no norm here."""
    if not cap:
        return
    factor = jnp.where(accept, jnp.minimum(1.0, cap / jnp.maximum(peak, 1e-6)), 1.0)
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.attn.wq_b.weight"
        heads = weights[name].reshape(config.num_attention_heads, config.head_dim, -1)
        weights[name] = (heads * factor[layer][:, None, None]).reshape(weights[name].shape)


def _balance(
    weights: dict[str, jax.Array], load: jax.Array, accept: jax.Array, rate: float
) -> None:
    """Move each router bias by `rate` towards equal load, by sign."""
    short = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    for layer in range(load.shape[0]):
        name = f"layers.{layer}.ffn.gate.bias"
        weights[name] = weights[name] + jnp.where(accept, rate, 0.0) * short[layer]
