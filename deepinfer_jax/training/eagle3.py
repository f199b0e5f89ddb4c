"""Eagle3, the baseline drafter: one layer that is unrolled over its own output while it trains.

Row index i starts a chain at the target's hidden state there and token i + 1; step s predicts token
i + s + 2 (drafting specification, "Eagle3"). The layer has the target's own parts: latent attention
with a sink, over the whole segment, and a mixture of experts; it has no hyper-connections. Its
tensors have no place in a release checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.checkpoint.inventory import Kind, TensorSpec
from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.layers import rope_table
from deepinfer_jax.training.drafter_attention import (
    Weights,
    latents,
    output,
    queries,
    with_sink,
)
from deepinfer_jax.training.drafter_blocks import Targets, make_blocks, rows_at
from deepinfer_jax.training.drafter_forward import DrafterOptions
from deepinfer_jax.training.drafter_losses import acceptance, metric_sums
from deepinfer_jax.training.experts import moe
from deepinfer_jax.training.linear import project, rms_norm

STEP_WEIGHT = 0.8
_ROUTED = "eagle3.ffn.experts."


def eagle3_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Shape, storage kind and types of every tensor; routed experts are per expert, not stacked."""
    d, f, heads = config.hidden_size, config.moe_intermediate_size, config.num_attention_heads
    low, wide = config.o_groups * config.o_lora_rank, heads * config.head_dim
    experts = config.dspark_n_routed_experts
    table: dict[str, TensorSpec] = {}

    def add(name: str, *shape: int, kind: Kind = "plain", dtype: str = "BF16") -> None:
        table[f"eagle3.{name}"] = TensorSpec(shape, (dtype,), kind, "eagle3")

    add("fc.weight", d, len(config.dspark_target_layer_ids) * d, kind="q8")
    for name in ("embed_norm", "hidden_norm", "ffn_norm", "norm"):
        add(f"{name}.weight", d)
    add("attn.wq_a.weight", config.q_lora_rank, 2 * d, kind="q8")
    add("attn.q_norm.weight", config.q_lora_rank)
    add("attn.wq_b.weight", wide, config.q_lora_rank, kind="q8")
    add("attn.wkv.weight", config.head_dim, 2 * d, kind="q8")
    add("attn.kv_norm.weight", config.head_dim)
    add("attn.attn_sink", heads, dtype="F32")
    add("attn.wo_a.weight", low, wide // config.o_groups, kind="q8")
    add("attn.wo_b.weight", d, low, kind="q8")
    add("ffn.gate.weight", experts, d)
    add("ffn.gate.bias", experts, dtype="F32")
    for name, o, i in (("w1", f, d), ("w2", d, f), ("w3", f, d)):
        add(f"ffn.experts.{name}.weight", o, i, kind="q4")
        add(f"ffn.shared_experts.{name}.weight", o, i, kind="q8")
    return table


def eagle3_initial_values(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """float32 masters by training name; routed experts are stacked, [e, o, i]."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, spec in eagle3_specs(config).items():
        shape = spec.shape
        if name.startswith(_ROUTED):
            shape = (config.dspark_n_routed_experts, *shape)
        if name.endswith("norm.weight"):
            value = np.ones(shape)
        elif name.endswith((".attn_sink", ".gate.bias")):
            value = np.zeros(shape)
        else:
            small = 0.5 if name.endswith((".wo_b.weight", ".w2.weight")) else 1.0
            value = rng.normal(0, small / math.sqrt(shape[-1]), shape)
        values[name] = value.astype(np.float32)
    return values


def eagle3_objective(
    weights: Weights,
    frozen: Weights,
    targets: Targets,
    config: ModelConfig,
    options: DrafterOptions,
    steps: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training-time test of `steps` unrolled steps: the loss, metric sums, and `load`.

    Loss: sum over steps of 0.8^s times the cross-entropy of the target's distribution, summed over
    valid indices and divided by b t. An index is valid at a step while token i + 1 and all that the
    chain has predicted so far are trained tokens of one segment.

    Args:
        weights: float32 masters. frozen: the target's `embed.weight` and `head.weight`.
        targets: the batch. config: numbers. options: static choices. steps: g.
    """
    dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
    frozen = jax.lax.stop_gradient({k: frozen[k] for k in ("embed.weight", "head.weight")})
    ids, segment = targets.ids, targets.segment
    b, t = ids.shape
    after = jnp.minimum(jnp.arange(1, t + 1, dtype=jnp.int32), t - 1)
    trained = targets.mask[:, after] & (segment[:, after] == segment) & (segment > 0)
    trained = trained & (jnp.arange(t) + 1 < t)
    chains = make_blocks(
        ids,
        segment,
        targets.mask,
        jnp.broadcast_to(after, (b, t)),
        trained,
        size=steps,
        noise=0,
    )
    hidden = project(
        jax.lax.stop_gradient(targets.taps).astype(dtype), weights["eagle3.fc.weight"], dtype
    )
    first = frozen["embed.weight"][chains.previous[:, :, 0]].astype(dtype)
    causal = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
    same = (segment[:, :, None] == segment[:, None, :]) & (segment > 0)[:, :, None]
    places = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    layer = _Layer(weights, first, hidden, causal & same, places, config, options)
    target_head = jax.lax.stop_gradient(targets.hidden).astype(dtype)
    loss, accepted = jnp.zeros((), jnp.float32), []
    for step in range(steps):
        embedded = frozen["embed.weight"][chains.previous[:, :, step]].astype(dtype)
        hidden = layer.step(embedded, hidden, trained)
        normed = rms_norm(hidden, weights["eagle3.norm.weight"], config.rms_norm_eps)
        logits = project(normed, frozen["head.weight"], jnp.float32)
        told = rows_at(target_head, chains.places[:, :, step])
        wanted = jax.nn.softmax(project(told, frozen["head.weight"], jnp.float32), axis=-1)
        valid = chains.valid[:, :, step]
        entropy = -jnp.sum(wanted * jax.nn.log_softmax(logits, axis=-1), axis=-1)
        loss = loss + STEP_WEIGHT**step * jnp.sum(jnp.where(valid, entropy, 0.0)) / (b * t)
        l1 = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - wanted), axis=-1)
        accepted.append(acceptance(l1))
    sums = metric_sums(jnp.stack(accepted, axis=-1), None, chains.valid)
    return loss, {"loss": loss, "load": layer.load[None]} | sums


def eagle3_drafts(
    weights: Weights,
    frozen: Weights,
    taps: jax.Array,
    ids: jax.Array,
    anchors: jax.Array,
    config: ModelConfig,
    options: DrafterOptions,
) -> jax.Array:
    """Greedy chains int32 [b, a, g], g = `dspark_block_size`: slot k is for column anchor + k + 1.

    A chain starts at the state before its anchor and the anchor's token, and goes on with its own
    states and tokens. It sees the whole row up to there.

    Args:
        weights: float32, of the drafter. frozen: the target's `embed.weight` and `head.weight`.
        taps: [b, t, taps d], the target's. ids: int32 [b, t], one sequence from column 0 on.
        anchors: int32 [b, a], columns from 1 on.
        config: numbers. options: static choices.
    """
    dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
    places = anchors - 1
    hidden = project(taps.astype(dtype), weights["eagle3.fc.weight"], dtype)
    after = frozen["embed.weight"][jnp.roll(ids, -1, axis=1)].astype(dtype)
    seen = jnp.arange(ids.shape[1], dtype=jnp.int32) <= places[:, :, None]
    layer = _Layer(weights, after, hidden, seen, places, config, options)
    hidden, token = rows_at(hidden, places), rows_at(ids, anchors)
    drafts = []
    for _ in range(config.dspark_block_size):
        embedded = frozen["embed.weight"][token].astype(dtype)
        hidden = layer.step(embedded, hidden, jnp.zeros(places.shape, bool))
        normed = rms_norm(hidden, weights["eagle3.norm.weight"], config.rms_norm_eps)
        logits = project(normed, frozen["head.weight"], jnp.float32)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts.append(token)
    return jnp.stack(drafts, axis=-1)


class _Layer:
    """The layer over the steps of one trace: it remembers the keys of the steps before."""

    def __init__(
        self,
        weights: Weights,
        embedded: jax.Array,
        hidden: jax.Array,
        seen: jax.Array,
        places: jax.Array,
        config: ModelConfig,
        options: DrafterOptions,
    ):
        """Make the keys of the first step of all t indices of a row; q of them have a chain.

        Args:
            weights: of the drafter.
            embedded: [b, t, d], the token after each index.
            hidden: [b, t, d], the projected state of the target there.
            seen: bool [b, q, t], the indices whose keys a chain sees, its own among them.
            places: int32 [b, q], the index of each chain.
            config: numbers. options: static choices.
        """
        self.weights, self.config, self.options = weights, config, options
        self.experts = replace(config, num_experts_per_tok=config.dspark_num_experts_per_tok)
        self.seen, self.places = seen[:, :, None, :], places
        b, t = hidden.shape[:2]
        # The table is longer than a row: step s sits at position i + s.
        self.table = jnp.asarray(rope_table(config, t + config.dspark_block_size, compressed=False))
        angles = jnp.broadcast_to(self.table[:t], (b, *self.table[:t].shape))
        self.keys = [self._keys(self._entering(embedded, hidden), angles)]
        self.steps = 0
        self.load = jnp.zeros((config.dspark_n_routed_experts,), jnp.float32)

    def _entering(self, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
        weights, eps = self.weights, self.config.rms_norm_eps
        return jnp.concatenate(
            [
                rms_norm(embedded, weights["eagle3.embed_norm.weight"], eps),
                rms_norm(hidden, weights["eagle3.hidden_norm.weight"], eps),
            ],
            axis=-1,
        )

    def _keys(self, u: jax.Array, angles: jax.Array) -> jax.Array:
        quantize = self.options.quantize
        return latents(u, self.weights, "eagle3.attn", angles, self.config, quantize=quantize)

    def step(self, embedded: jax.Array, hidden: jax.Array, counted: jax.Array) -> jax.Array:
        """The next hidden state [b, q, d] of tokens `embedded` and the state before, [b, q, d].

        `counted` bool [b, q] says whose routing is in the load.
        """
        weights, config, eps = self.weights, self.config, self.config.rms_norm_eps
        angles = self.table[self.places + self.steps]
        u = self._entering(embedded, hidden)
        if self.steps:
            self.keys.append(self._keys(u, angles))
        self.steps += 1
        q = queries(u, weights, "eagle3.attn", angles, config)
        first, later = self.keys[0], self.keys[1:]
        scores = [jnp.einsum("bqhc,bkc->bqhk", q, first, preferred_element_type=jnp.float32)]
        masks = [self.seen]
        # Of later steps an index sees its own keys alone: they are its chain.
        for keys in later:
            own = jnp.einsum("bqhc,bqc->bqh", q, keys, preferred_element_type=jnp.float32)
            scores.append(own[..., None])
            masks.append(jnp.ones((1, 1, 1, 1), bool))
        p, *p_own = with_sink(scores, masks, weights["eagle3.attn.attn_sink"])
        o = jnp.einsum(
            "bqhk,bkc->bqhc", p.astype(q.dtype), first, preferred_element_type=jnp.float32
        )
        for weight, keys in zip(p_own, later, strict=True):
            o = o + weight * keys[:, :, None, :].astype(jnp.float32)
        y = output(o.astype(q.dtype), weights, "eagle3.attn", angles, config)
        hidden = hidden + y
        u = rms_norm(hidden, weights["eagle3.ffn_norm.weight"], eps)
        y, chosen = moe(u, weights, "eagle3.ffn", self.experts)
        here = chosen & counted[..., None]
        self.load = self.load + jnp.sum(here, axis=(0, 1), dtype=jnp.float32)
        return hidden + y


def eagle3_to_checkpoint(
    values: Mapping[str, np.ndarray], config: ModelConfig
) -> tuple[dict[str, np.ndarray], dict[str, TensorSpec]]:
    """float32 tensors with experts apart, and the spec of each."""
    tensors, table = {}, {}
    for name, spec in eagle3_specs(config).items():
        value = np.asarray(values[name], np.float32)
        if not name.startswith(_ROUTED):
            tensors[name], table[name] = value, spec
            continue
        for e, part in enumerate(value):
            single = f"{_ROUTED}{e}.{name.removeprefix(_ROUTED)}"
            tensors[single], table[single] = part, spec
    return tensors, table
