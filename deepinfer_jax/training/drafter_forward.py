"""The training forward of a block drafter: all draft blocks of packed rows at once.

DSpark's stages with its Markov and confidence heads, or DFlash: the same stages without them
(drafting specification, "Draft forward" and "Sequential sampling and the confidence head").
Slots that a row's blocks hold lie side by side on one axis s = a g.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.layers import rope_table
from deepinfer_jax.training.drafter_attention import (
    Weights,
    latents,
    output,
    queries,
    with_sink,
)
from deepinfer_jax.training.drafter_blocks import Blocks, context_mask
from deepinfer_jax.training.experts import moe
from deepinfer_jax.training.hyper_connections import collapse, mixes, write_back
from deepinfer_jax.training.linear import project, rms_norm


@dataclass(frozen=True)
class DrafterOptions:
    """Static choices of a drafter's forward.

    Attributes:
        bfloat16: products and streams in bfloat16; else all in float32.
        kernel: mHC normalises in the GPU kernel.
        quantize: keys are rounded as the window cache stores them.
        heads: DSpark's Markov and confidence heads; without them it is DFlash.
    """

    bfloat16: bool = False
    kernel: bool = False
    quantize: bool = True
    heads: bool = True


@dataclass(frozen=True)
class DrafterResult:
    """What a drafter's forward gives for a anchors a row and g slots a block.

    Attributes:
        logits: float32 [b, a, g, v], Markov bias included.
        confidence: float32 [b, a, g], logits of the confidence head; None without heads.
        load: float32 [stages, experts], slots routed to each expert; dummies are not counted.
    """

    logits: jax.Array
    confidence: jax.Array | None
    load: jax.Array


def draft_forward(
    weights: Weights,
    frozen: Weights,
    taps: jax.Array,
    segment: jax.Array,
    blocks: Blocks,
    config: ModelConfig,
    options: DrafterOptions,
) -> DrafterResult:
    """Logits of every slot, the true previous token given to the Markov head.

    Arguments are those of `draft_states`.
    """
    z, base, load = draft_states(weights, frozen, taps, segment, blocks, config, options)
    if not options.heads:
        return DrafterResult(base, None, load)
    return DrafterResult(*markov(weights, z, base, blocks.previous, config), load)


def draft_states(
    weights: Weights,
    frozen: Weights,
    taps: jax.Array,
    segment: jax.Array,
    blocks: Blocks,
    config: ModelConfig,
    options: DrafterOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What every slot knows without the tokens drafted before it.

    Args:
        weights: float32 masters of the drafter, `mtp.*`, by training name.
        frozen: the target's `embed.weight` and `head.weight`; they get no gradient.
        taps: [b, t, taps d], the target's.
        segment: int32 [b, t], 0 for padding.
        blocks: the blocks; every slot sees the window's context strictly before its anchor and the
            whole of its own block.
        config: the network's numbers. options: static choices.

    Returns:
        z [b, a, g, d], collapsed streams before the norm, base logits float32 [b, a, g, v], and
        the load as in `DrafterResult`.
    """
    dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
    frozen = jax.lax.stop_gradient({k: frozen[k] for k in ("embed.weight", "head.weight")})
    (b, a, g), (t, eps) = blocks.inputs.shape, (segment.shape[1], config.rms_norm_eps)
    table = jnp.asarray(rope_table(config, t + g, compressed=False))
    context_angles = jnp.broadcast_to(table[:t], (b, *table[:t].shape))
    places = blocks.anchors[:, :, None] + jnp.arange(g, dtype=jnp.int32)
    angles = table[places.reshape(b, a * g)]
    seen = context_mask(blocks, segment, config.sliding_window)[:, :, None, None, :]
    block = jnp.broadcast_to(blocks.keep[:, :, None, None, None], (b, a, 1, 1, g))

    x = project(jax.lax.stop_gradient(taps).astype(dtype), weights["mtp.0.main_proj.weight"], dtype)
    context = rms_norm(x, weights["mtp.0.main_norm.weight"], eps)
    embedded = frozen["embed.weight"][blocks.inputs.reshape(b, a * g)].astype(dtype)
    streams = jnp.repeat(embedded[:, :, None, :], config.hc_mult, axis=2)
    pre = jnp.zeros(streams.shape[:3], jnp.float32).at[..., 0].set(1.0)
    experts = replace(config, num_experts_per_tok=config.dspark_num_experts_per_tok)
    counted = jnp.repeat(blocks.keep, g, axis=1)[..., None]
    load = []
    for stage in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{stage}"
        u = rms_norm(collapse(streams, pre), weights[f"{prefix}.attn_norm.weight"], eps)
        far = latents(
            context, weights, f"{prefix}.attn", context_angles, config, quantize=options.quantize
        )
        y = _attention(
            u, far, seen, block, angles, weights, f"{prefix}.attn", config, options.quantize
        )
        pre_attn, post, comb = mixes(
            streams, weights, f"{prefix}.hc_attn", config, kernel=options.kernel
        )
        streams = write_back(streams, y, post, comb)
        pre, post, comb = mixes(streams, weights, f"{prefix}.hc_ffn", config, kernel=options.kernel)
        u = rms_norm(collapse(streams, pre_attn), weights[f"{prefix}.ffn_norm.weight"], eps)
        y, chosen = moe(u, weights, f"{prefix}.ffn", experts)
        load.append(jnp.sum(chosen & counted, axis=(0, 1), dtype=jnp.float32))
        streams = write_back(streams, y, post, comb)

    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    z = collapse(streams, pre)
    normed = rms_norm(z, weights[f"{last}.norm.weight"], eps)
    base = project(normed, frozen["head.weight"], jnp.float32).reshape(b, a, g, -1)
    return z.reshape(b, a, g, -1), base, jnp.stack(load)


def markov(
    weights: Weights, z: jax.Array, base: jax.Array, previous: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Logits float32 [..., v] and logits of the confidence float32 [...] of slots.

    Args:
        weights: of the drafter. z: [..., d]. base: float32 [..., v].
        previous: int32 [...], the token before the one that a slot predicts.
        config: the network's numbers.
    """
    last = f"mtp.{config.num_nextn_predict_layers - 1}"
    e = weights[f"{last}.markov_head.embed.weight"][previous]
    logits = base + project(e, weights[f"{last}.markov_head.head.weight"], jnp.float32)
    # The confidence reads the collapsed state before the norm, in float32.
    features = jnp.concatenate([z.astype(jnp.float32), e], axis=-1)
    proj = weights[f"{last}.confidence_head.proj.weight"][0]
    return logits, jnp.matmul(features, proj, precision="highest")


def _attention(
    u: jax.Array,
    far: jax.Array,
    seen: jax.Array,
    block: jax.Array,
    angles: jax.Array,
    weights: Weights,
    name: str,
    config: ModelConfig,
    quantize: bool,
) -> jax.Array:
    """The attention of a stage, [b, s, d]: context `far` [b, t, c] and the block, no causal mask.

    All rows of a batch are scored against all context columns and masked: eight times the products
    of a gathered window, but its gradient is a product too, not a scatter.
    """
    b, a, g = block.shape[0], block.shape[1], block.shape[-1]
    q = queries(u, weights, name, angles, config)
    heads, width = q.shape[2:]
    near = latents(u, weights, name, angles, config, quantize=quantize).reshape(b, a, g, width)
    q = q.reshape(b, a, g, heads, width)
    p_far, p_near = with_sink(
        (
            jnp.einsum("baghc,btc->baght", q, far, preferred_element_type=jnp.float32),
            jnp.einsum("baghc,bakc->baghk", q, near, preferred_element_type=jnp.float32),
        ),
        (seen, block),
        weights[f"{name}.attn_sink"],
    )
    o = jnp.einsum(
        "baght,btc->baghc", p_far.astype(q.dtype), far, preferred_element_type=jnp.float32
    )
    o = o + jnp.einsum(
        "baghk,bakc->baghc", p_near.astype(q.dtype), near, preferred_element_type=jnp.float32
    )
    o = o.astype(q.dtype).reshape(b, a * g, heads, width)
    return output(o, weights, name, angles, config)
