"""Compressed KV: entries and index keys of one kv source, written as their groups close."""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import Rows, SourceCache
from deepinfer_jax.model.layers import rms_norm, rotate
from deepinfer_jax.model.params import Compressor, Indexer
from deepinfer_jax.ops.packed import expand
from deepinfer_jax.ops.table import Ops


@flax.struct.dataclass
class Compressed:
    """What each row contributes: the entry that its position closes, if it closes one.

    Attributes:
        latent: [n, k], before RoPE.
        entry: [n, stored k]; index_key: [n, stored index k]; both after RoPE, as the caches hold
            them.
    """

    latent: jax.Array
    entry: jax.Array
    index_key: jax.Array


def _pairs(
    x: jax.Array, params: Compressor, rows: Rows, raw: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each row mixed with the row before it, [n, k] float32, and the new raw rows."""
    x32 = x.astype(jnp.float32)
    weights = jnp.concatenate([expand(params.wkv, jnp.float32), expand(params.wgate, jnp.float32)])
    own = jnp.einsum("nd,kd->nk", x32, weights, precision="highest")
    before, in_step, row = rows.back(jnp.ones(1, jnp.int32))
    kept = raw[rows.slot, before[:, 0] % raw.shape[1]]
    # Read before it is written, the cache is written in place.
    kept, raw = jax.lax.optimization_barrier((kept, raw))
    first = jnp.where(in_step, own[row[:, 0]], kept)
    (u0, g0), (u1, g1) = jnp.split(first, 2, -1), jnp.split(own, 2, -1)
    share = jax.nn.sigmoid(g1 - g0)  # a softmax over the two positions, per channel
    mixed = (1 - share) * u0 + share * u1
    raw = raw.at[rows.writable(raw.shape[1]), rows.position % raw.shape[1]].set(own, mode="drop")
    return mixed, raw


def compress(
    x: jax.Array,
    params: Compressor,
    indexer: Indexer,
    rows: Rows,
    cache: SourceCache,
    table: jax.Array,
    rope: jax.Array,
    *,
    ratio: int,
    config: ModelConfig,
    arithmetic: Arithmetic,
    ops: Ops,
) -> tuple[Compressed, SourceCache]:
    """Write the entries and index keys of the groups that close in this step.

    Args:
        x: [n, d], the layer's normed attention input.
        table: int32 [slots, pages], the sequences' page tables.
        rope: float32 [positions, 2, rope/2]; an entry takes its group's first position.

    Entry j covers positions j r to j r + r - 1 (model specification, "Compressor", "Indexer").
    """
    raw = cache.raw
    if raw is None:
        mixed = ops.linear(x, params.wkv)
    else:
        mixed, raw = _pairs(x, params, rows, raw)
        mixed = mixed.astype(x.dtype)
    latent = rms_norm(mixed, params.norm, config.rms_norm_eps)
    entry_id = rows.position // ratio
    angles = rope[entry_id * ratio]
    entry = rotate(latent, angles)
    key = rms_norm(ops.linear(latent, indexer.wk), indexer.k_norm, config.rms_norm_eps)
    key = rotate(key, angles)
    entry, key = arithmetic.caches.entry.encode(entry), arithmetic.caches.index_key.encode(key)
    page, place = cache.closing(table, rows, ratio)
    cache = SourceCache(
        entries=cache.entries.at[page, place].set(entry, mode="drop"),
        index_keys=cache.index_keys.at[page, place].set(key, mode="drop"),
        raw=raw,
    )
    return Compressed(latent, entry, key), cache
