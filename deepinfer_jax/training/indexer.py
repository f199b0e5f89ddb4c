"""The indexer in training: keys, scores, the selection, and its loss.

Its inputs are detached, so the loss moves the indexer alone and never the trunk.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import LayerPlan, ModelConfig
from deepinfer_jax.ops.quant import qdq_fp4
from deepinfer_jax.training.attend import Masks
from deepinfer_jax.training.linear import project, rms_norm
from deepinfer_jax.training.quantize import straight_through
from deepinfer_jax.training.rotary import rotate
from deepinfer_jax.training.selection import candidate_mask, sortable, top_k_mask

Scores = tuple[jax.Array, ...]


def index_keys(
    latent: jax.Array,
    angles: np.ndarray,
    weights: Mapping[str, jax.Array],
    layer: int,
    config: ModelConfig,
) -> jax.Array:
    """Rotated keys [b, n, index_head_dim] of the un-rotated latent [b, n, head_dim], detached."""
    name = f"layers.{layer}.attn.indexer"
    latent = jax.lax.stop_gradient(latent)
    keys = project(latent, weights[f"{name}.wk.weight"], latent.dtype, False)
    keys = rms_norm(keys, weights[f"{name}.k_norm.weight"], config.rms_norm_eps)
    return rotate(keys, angles)


def index_scores(
    x: jax.Array,
    qr: jax.Array,
    keys: jax.Array,
    chunks: Sequence[tuple[int, int, int]],
    angles: np.ndarray,
    weights: Mapping[str, jax.Array],
    layer: int,
    config: ModelConfig,
    *,
    quantize: bool,
) -> tuple[Scores, jax.Array]:
    """Scores of one index source.

    Args:
        x: [b, r, d], the attention input.
        qr: [b, r, q_lora_rank], the normed query latent.
        keys: [b, n, index_head_dim].
        chunks: (first row, end row, entries) of each chunk.
        angles: float32 [r, 2, rotary / 2].
        weights: the parameters.
        layer: the index source.
        config: the network's numbers.
        quantize: round the queries as the engine does.

    Returns:
        float32 [b, rows, entries] per chunk, and the largest absolute score.
        Formula: model specification, section "Indexer".
    """
    name = f"layers.{layer}.attn.indexer"
    x, qr = jax.lax.stop_gradient(x), jax.lax.stop_gradient(qr)
    b, r, _ = x.shape
    h, d = config.index_n_heads, config.index_head_dim
    q = project(qr, weights[f"{name}.wq_b.weight"], x.dtype, False).reshape(b, r, h, d)
    q = rotate(q, angles)
    if quantize:
        q = straight_through(qdq_fp4, q)
    head = project(x, weights[f"{name}.weights_proj.weight"], jnp.float32, False)
    head = head * np.float32(d**-0.5 * h**-0.5)
    scores, peak = [], jnp.zeros((), jnp.float32)
    for low, high, count in chunks:
        dots = jnp.einsum(
            "bqhd,bnd->bqhn", q[:, low:high], keys[:, :count], preferred_element_type=x.dtype
        )
        part = jnp.sum(jax.nn.relu(dots).astype(jnp.float32) * head[:, low:high, :, None], axis=2)
        scores.append(part)
        peak = jnp.maximum(peak, jnp.max(jnp.abs(jax.lax.stop_gradient(part))))
    return tuple(scores), peak


def select(
    scores: Scores,
    visible: Masks,
    candidates: Masks | None,
    bounds: Sequence[int],
    plan: LayerPlan,
    config: ModelConfig,
    sparse: bool | jax.Array,
) -> tuple[Masks, Masks | None]:
    """The entries each row attends to, and the candidate blocks that later sources must stay in.

    `sparse` False selects every visible entry; a traced bool decides at run time. Candidates are
    returned by the layer that writes them and used by those after it (model specification,
    section "Two-level candidates").
    """

    def choose(scores: Scores, visible: Masks) -> tuple[Masks, Masks]:
        chosen, written = [], []
        for i, (part, seen) in enumerate(zip(scores, visible, strict=True)):
            keys = sortable(part, seen)
            if plan.writes_candidates:
                rows = jnp.arange(bounds[i], bounds[i + 1], dtype=jnp.int32)
                newest = (rows + 1)[:, None] // plan.ratio - 1
                size, blocks = config.candidate_block_size, config.candidate_topk_blocks
                written.append(candidate_mask(keys, newest, size, blocks))
            if plan.uses_candidates and candidates is not None:
                keys = jnp.where(candidates[i], keys, jnp.uint32(0))
            chosen.append(top_k_mask(keys, config.index_topk))
        return tuple(chosen), tuple(written)

    def everything(scores: Scores, visible: Masks) -> tuple[Masks, Masks]:
        del scores
        return visible, visible if plan.writes_candidates else ()

    scores = jax.lax.stop_gradient(scores)
    if isinstance(sparse, bool):
        selected, written = (choose if sparse else everything)(scores, visible)
    else:
        # One branch for all chunks: each may cost a GPU a wait for the predicate.
        selected, written = jax.lax.cond(sparse, choose, everything, scores, visible)
    return selected, written if plan.writes_candidates else None


def index_loss(scores: Scores, visible: Masks, mass: Scores) -> jax.Array:
    """Sum over rows of M KL(mass / M || softmax of the scores over visible entries).

    Args:
        scores: float32 [b, rows, n] per chunk.
        visible: bool, the same shapes.
        mass: float32, attention mass on each entry (mean over heads and layers), no gradient; zero
            where not visible. Its sum M over entries weights the row, so rows that retrieve
            nothing count little.
    """
    chunks = zip(scores, visible, mass, strict=True)
    return sum((_divergence(*chunk) for chunk in chunks), jnp.zeros((), jnp.float32))


@jax.custom_vjp
def _divergence(scores: jax.Array, visible: jax.Array, mass: jax.Array) -> jax.Array:
    return _divergence_forward(scores, visible, mass)[0]


def _divergence_forward(
    scores: jax.Array, visible: jax.Array, mass: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    logits = jnp.where(visible, scores, -1e30)
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    weight = jnp.sum(mass, axis=-1, keepdims=True)
    # mass log(mass / M) - mass (I - norm), and zero where there is no mass
    ratio = jnp.log(jnp.maximum(mass, 1e-30)) - jnp.log(jnp.maximum(weight, 1e-30))
    parts = jnp.where(mass > 0, mass * (ratio - logits + norm), 0.0)
    return jnp.sum(parts), (scores, visible, mass, norm, weight)


def _divergence_backward(
    saved: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, None, None]:
    scores, visible, mass, norm, weight = saved
    chance = jnp.where(visible, jnp.exp(scores - norm), 0.0)
    return g * (weight * chance - mass), None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)
