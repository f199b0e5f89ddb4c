"""What a step reads and writes between tokens: the rows of a step and the caches they address.

Every cache is addressed by absolute position, so that undoing a token means forgetting its length
and nothing else (model specification, "Speculation and rollback").
"""

import flax.struct
import jax
import jax.numpy as jnp

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic

BACKTRACK = 6  # positions a ring keeps beyond its window, so that rejected drafts can be undone


@flax.struct.dataclass
class Rows:
    """The tokens of one step, all int32 [n].

    Rows of one slot stand together, in ascending consecutive positions.

    Attributes:
        ids: token ids.
        position: absolute position; -1 marks a padding row, which writes nothing.
        slot: the sequence's place in the caches.
        start: position of the slot's first row in this step.
        stop: one past the position of the slot's last row in this step.
    """

    ids: jax.Array
    position: jax.Array
    slot: jax.Array
    start: jax.Array
    stop: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Rows that are not padding, bool [n]."""
        return self.position >= 0

    def back(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What lies `steps` int32 [c] positions before each row.

        Returns the position, whether it is a row of this step, and that row's index (0 where it is
        not), each [n, c].
        """
        position = self.position[:, None] - steps
        in_step = position >= self.start[:, None]
        row = jnp.arange(self.ids.shape[0], dtype=jnp.int32)[:, None] - steps
        return position, in_step, jnp.where(in_step, row, 0)

    def writable(self, ring: int) -> jax.Array:
        """The slot for rows that a ring of `ring` positions keeps, an impossible slot for others.

        Of a chunk longer than the ring only the last rows are written, so that no two rows of a
        step meet in one place.
        """
        keep = self.valid & (self.position >= self.stop - ring)
        return jnp.where(keep, self.slot, jnp.iinfo(jnp.int32).max)


@flax.struct.dataclass
class SourceCache:
    """Compressed KV of one kv source.

    Attributes:
        entries: [slots, m, k], after RoPE.
        index_keys: [slots, m, index k], after RoPE.
        raw: float32 [slots, ring, 2 k], (u, g) rows of a ratio-2 compressor; None at ratio 1.
    """

    entries: jax.Array
    index_keys: jax.Array
    raw: jax.Array | None


@flax.struct.dataclass
class Cache:
    """All state of the sequences that is not in `Rows`.

    Attributes:
        window: [layers, slots, ring, k], after RoPE; ring = window + BACKTRACK.
        sources: one per kv source, in order.
        history: int32 [slots, ring], compressed token ids; -1 for a token of an image span.
    """

    window: jax.Array
    sources: tuple[SourceCache, ...]
    history: jax.Array


def init_cache(config: ModelConfig, arithmetic: Arithmetic, *, slots: int, positions: int) -> Cache:
    """Zeroed caches for `slots` sequences of at most `positions` tokens each."""
    k, dtype = config.head_dim, arithmetic.dtype
    ring = config.sliding_window + BACKTRACK
    sources = []
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        m = positions // ratio
        raw = jnp.zeros((slots, ratio + BACKTRACK, 2 * k), jnp.float32) if ratio > 1 else None
        sources.append(
            SourceCache(
                entries=jnp.zeros((slots, m, k), dtype),
                index_keys=jnp.zeros((slots, m, config.index_head_dim), dtype),
                raw=raw,
            )
        )
    return Cache(
        window=jnp.zeros((config.num_hidden_layers, slots, ring, k), dtype),
        sources=tuple(sources),
        history=jnp.full((slots, config.engram_max_ngram_size - 1 + BACKTRACK), -1, jnp.int32),
    )


def record_bytes(config: ModelConfig) -> dict[str, int]:
    """Bytes of one record in the release's formats (model specification, "Sizes").

    window: FP8 codes and a scale byte per 32; entry: FP4 codes and a scale byte per 16; index key:
    FP4 codes and a scale byte per 32.
    """
    k, i = config.head_dim, config.index_head_dim
    return {"window": k + k // 32, "entry": k // 2 + k // 16, "index_key": i // 2 + i // 32}


def kv_bytes_per_token(config: ModelConfig) -> float:
    """Bytes that grow with every token, in the release's formats: entries and index keys."""
    record = record_bytes(config)
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    return sum((record["entry"] + record["index_key"]) / r for r in ratios)
