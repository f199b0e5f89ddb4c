"""Router and mixture of experts, computed densely: all experts on every token, by weight."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.training.linear import project


def route(
    x: jax.Array, gate: jax.Array, bias: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Weights [b, t, experts] float32 (zero where not selected) and the selection, bool.

    The bias decides the selection only and gets no gradient; ties go to the lower index (model
    specification, section "MoE").
    """
    logits = project(x, gate, jnp.float32, False) / config.gate_temp
    # Below this floor the root's derivative would divide by zero.
    scores = jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), 1e-20))
    ranked = jax.lax.stop_gradient(scores) + bias
    selected = jnp.zeros(ranked.shape, bool)
    for _ in range(config.num_experts_per_tok):
        best = jnp.argmax(jnp.where(selected, -jnp.inf, ranked), axis=-1)
        selected = selected | jax.nn.one_hot(best, ranked.shape[-1], dtype=bool)
    weights = jnp.where(selected, scores, 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return config.routed_scaling_factor * weights / total, selected


@jax.checkpoint
def _activation(g: jax.Array, u: jax.Array, weights: jax.Array, limit: jax.Array) -> jax.Array:
    """min(g), clipped u, silu(g) u, times the route weight; [b, t, e, f]. Rematerialised."""
    g32 = jnp.minimum(g.astype(jnp.float32), limit)
    u32 = jnp.clip(u.astype(jnp.float32), -limit, limit)
    return (jax.nn.silu(g32) * u32 * weights[..., None]).astype(g.dtype)


def moe(
    x: jax.Array, weights: Mapping[str, jax.Array], prefix: str, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """The feed-forward sublayer.

    Args:
        x: [b, t, d], normed.
        weights: the parameters; `{prefix}.experts.w1.weight` is [e, f, d], `w2` [e, d, f].
        prefix: `layers.{l}.ffn`.
        config: the network's numbers.

    Returns:
        y [b, t, d] and the selection, bool [b, t, e].
    """
    b, t, d = x.shape
    route_weights, selected = route(
        x, weights[f"{prefix}.gate.weight"], weights[f"{prefix}.gate.bias"], config
    )
    # The shared expert is one more column block of the same three products, with weight 1.
    first, up, down = (
        jnp.concatenate(
            [
                weights[f"{prefix}.experts.{w}.weight"],
                weights[f"{prefix}.shared_experts.{w}.weight"][None],
            ]
        )
        for w in ("w1", "w3", "w2")
    )
    count, inner, _ = first.shape
    route_weights = jnp.concatenate([route_weights, jnp.ones((b, t, 1), jnp.float32)], axis=-1)
    g = project(x, first.reshape(count * inner, d), x.dtype, False)
    u = project(x, up.reshape(count * inner, d), x.dtype, False)
    shape = (b, t, count, inner)
    h = _activation(
        g.reshape(shape), u.reshape(shape), route_weights, jnp.float32(config.swiglu_limit)
    )
    down = down.transpose(1, 0, 2).reshape(d, count * inner)
    return project(h.reshape(b, t, count * inner), down, x.dtype, False), selected
