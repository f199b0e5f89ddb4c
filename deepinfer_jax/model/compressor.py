"""Compressed KV: entries and index keys of one kv source, written as their groups close."""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.cache import Rows, SourceCache
from deepinfer_jax.model.layers import rms_norm, rotate
from deepinfer_jax.model.params import Compressor, Indexer
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


def _raw_rows(x: jax.Array, params: Compressor, ops: Ops) -> jax.Array:
    """(u, g) of each row, float32 [n, 2 k]."""
    x = x.astype(jnp.float32)
    return jnp.concatenate([ops.linear(x, params.wkv), ops.linear(x, params.wgate)], 1)


def _mixed(first: jax.Array, second: jax.Array) -> jax.Array:
    """Two neighbouring raw rows each [n, 2 k] mixed into one [n, k]."""
    (u0, g0), (u1, g1) = jnp.split(first, 2, -1), jnp.split(second, 2, -1)
    share = jax.nn.sigmoid(g1 - g0)  # a softmax over the two positions, per channel
    return (1 - share) * u0 + share * u1


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
    entry_id = rows.position // ratio
    raw, before, caches = cache.raw, None, arithmetic.caches
    if raw is not None:
        own = ops.rowwise(lambda x: _raw_rows(x, params, ops), x, rows.used)
        position, in_step, row = rows.back(jnp.ones(1, jnp.int32))
        kept = raw[rows.slot, position[:, 0] % raw.shape[1]]
        # Read before it is written, the cache is written in place.
        kept, raw = jax.lax.optimization_barrier((kept, raw))
        before = jnp.where(in_step, own[row[:, 0]], kept), own
        place = rows.writable(raw.shape[1]), rows.position % raw.shape[1]
        raw = raw.at[place].set(own, mode="drop")

    def close(part: tuple[jax.Array, tuple[jax.Array, jax.Array] | None, jax.Array]) -> Compressed:
        x, pair, angles = part
        mixed = ops.linear(x, params.wkv) if pair is None else _mixed(*pair).astype(x.dtype)
        latent = rms_norm(mixed, params.norm, config.rms_norm_eps)
        entry = rotate(latent, angles)
        key = rms_norm(ops.linear(latent, indexer.wk), indexer.k_norm, config.rms_norm_eps)
        key = caches.index_key.encode(rotate(key, angles))
        return Compressed(latent, caches.entry.encode(entry), key)

    made = ops.rowwise(close, (x, before, rope[entry_id * ratio]), rows.used)
    page, place = cache.closing(table, rows, ratio)
    cache = SourceCache(
        entries=cache.entries.at[page, place].set(made.entry, mode="drop"),
        index_keys=cache.index_keys.at[page, place].set(made.index_key, mode="drop"),
        raw=raw,
    )
    return made, cache
