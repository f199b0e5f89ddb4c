"""What a step reads and writes between tokens: the rows of a step and the caches they address.

Every cache is addressed by absolute position, so that undoing a token means forgetting its length
and nothing else (model specification, "Speculation and rollback"). What grows with a sequence lies
in pages of `PAGE` positions, found through its page table; what does not grow lies in its slot.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.model.arithmetic import Arithmetic
from deepinfer_jax.model.records import RELEASE, CacheFormat, KeyFormat

BACKTRACK = 6  # positions a ring keeps beyond its window unless told, for the drafts of a block
PAGE = 128  # positions of one page; even, so that no group of a compressor straddles two pages
_NOWHERE = jnp.iinfo(jnp.int32).max  # an index that a scatter drops


def up_to_last(real: jax.Array) -> jax.Array:
    """How many of the rows bool [n] there are up to the last real one, int32 []."""
    count = jnp.arange(1, real.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(real, count, 0))


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
        floor: lowest position whose window key a row may see. A row below its own floor sees no
            window key and leaves none.
        write_from: entries that close below this position are read-only: they came with a prefix.
    """

    ids: jax.Array
    position: jax.Array
    slot: jax.Array
    start: jax.Array
    stop: jax.Array
    floor: jax.Array
    write_from: jax.Array

    @property
    def valid(self) -> jax.Array:
        """Rows that are not padding, bool [n]."""
        return self.position >= 0

    @property
    def used(self) -> jax.Array:
        """How many rows there are up to the last that is not padding, int32 []."""
        return up_to_last(self.valid)

    def back(
        self, steps: jax.Array, index: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What lies `steps` int32 [c] positions before each row.

        Returns the position, whether it is a row of this step, and that row's index (0 where it is
        not), each [n, c]. `index` int32 [n] are the places of these rows among the step's, when
        they are a part of them.
        """
        position = self.position[:, None] - steps
        in_step = position >= self.start[:, None]
        if index is None:
            index = jnp.arange(self.ids.shape[0], dtype=jnp.int32)
        row = index[:, None] - steps
        return position, in_step, jnp.where(in_step, row, 0)

    def writable(self, ring: int, *, floored: bool = True) -> jax.Array:
        """The slot for rows that a ring of `ring` positions keeps, an impossible slot for others.

        Of a chunk longer than the ring only the last rows are written, so that no two rows of a
        step meet in one place. With `floored`, rows below their floor are not written.
        """
        first = self.stop - ring
        if floored:
            first = jnp.maximum(first, self.floor)
        keep = self.valid & (self.position >= first)
        return jnp.where(keep, self.slot, _NOWHERE)


@flax.struct.dataclass
class SourceCache:
    """Compressed KV of one kv source.

    Attributes:
        entries: [pages, PAGE / ratio, stored k], after RoPE, in the arithmetic's cache format.
        index_keys: [pages, PAGE / ratio, stored index k], likewise.
        raw: float32 [slots, ring, 2 k], (u, g) rows of a ratio-2 compressor; None at ratio 1.
    """

    entries: jax.Array
    index_keys: jax.Array
    raw: jax.Array | None

    def flat(self, table: jax.Array, slot: jax.Array, entry: jax.Array) -> jax.Array:
        """Row of entry `entry` of sequence `slot` in the flattened pages; int32, any one shape."""
        per_page = self.entries.shape[1]
        return table[slot, entry // per_page] * per_page + entry % per_page

    def closing(self, table: jax.Array, rows: Rows, ratio: int) -> tuple[jax.Array, jax.Array]:
        """(page, place in it) int32 [n] of the entries that close in this step.

        The page of a row that closes none, or one that is read-only, is an impossible one.
        """
        closes = rows.valid & (rows.position % ratio == ratio - 1)
        closes &= rows.position >= rows.write_from
        page = table[rows.slot, rows.position // PAGE]
        return jnp.where(closes, page, _NOWHERE), rows.position % PAGE // ratio


@flax.struct.dataclass
class Cache:
    """All state of the sequences that is not in `Rows`.

    Attributes:
        window: [layers, slots, ring, stored k], after RoPE, in the arithmetic's cache format;
            ring = window + what rejected drafts take back.
        sources: one per kv source, in order; a page has the same number in all of them.
        history: int32 [slots, ring], compressed token ids; -1 for a token of an image span.
        table: int32 [slots, pages of the longest sequence], page numbers; 0 where none is given.
        draft: [stages, slots, ring, stored k], context keys of the draft stages, as `window` holds
            a layer's; None without a drafter.
    """

    window: jax.Array
    sources: tuple[SourceCache, ...]
    history: jax.Array
    table: jax.Array
    draft: jax.Array | None = None


def pages_of(positions: int) -> int:
    """Pages that a sequence of so many positions fills."""
    return -(-positions // PAGE)


def init_cache(
    config: ModelConfig,
    arithmetic: Arithmetic,
    *,
    slots: int,
    positions: int,
    pages: int | None = None,
    drafter: bool = False,
    backtrack: int = BACKTRACK,
) -> Cache:
    """Zeroed caches for `slots` sequences of at most `positions` tokens each.

    `pages` counts page 0, which belongs to nobody; their owners are written into the table by
    whoever gives them out. Without it every slot owns the pages it can ever need. With `drafter`
    there are rings for the draft stages too. Rings keep `backtrack` positions beyond their window,
    so that rejected drafts can be undone: one more than a step verifies at least.
    """
    k, caches = config.head_dim, arithmetic.caches
    ring, per_slot = config.sliding_window + backtrack, pages_of(positions)
    table: np.ndarray = np.zeros((slots, per_slot), np.int32)
    if pages is None:
        pages = 1 + slots * per_slot
        table += np.arange(1, pages, dtype=np.int32).reshape(table.shape)
    sources = []

    def zeros(kind: KeyFormat, channels: int, *lead: int) -> jax.Array:
        return jnp.zeros((*lead, kind.size(channels)), kind.dtype)

    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        held = pages, PAGE // ratio
        raw = jnp.zeros((slots, ratio + backtrack, 2 * k), jnp.float32) if ratio > 1 else None
        sources.append(
            SourceCache(
                entries=zeros(caches.entry, k, *held),
                index_keys=zeros(caches.index_key, config.index_head_dim, *held),
                raw=raw,
            )
        )
    return Cache(
        window=zeros(caches.window, k, config.num_hidden_layers, slots, ring),
        sources=tuple(sources),
        history=jnp.full((slots, config.engram_max_ngram_size - 1 + backtrack), -1, jnp.int32),
        table=jnp.asarray(table),
        draft=zeros(caches.window, k, len(config.stages), slots, ring) if drafter else None,
    )


def record_bytes(config: ModelConfig, caches: CacheFormat = RELEASE) -> dict[str, int]:
    """Bytes of one key of each kind: window, entry and index key (model specification, "Sizes")."""
    k, i = config.head_dim, config.index_head_dim
    return {
        "window": caches.window.nbytes(k),
        "entry": caches.entry.nbytes(k),
        "index_key": caches.index_key.nbytes(i),
    }


def kv_bytes_per_token(config: ModelConfig, caches: CacheFormat = RELEASE) -> float:
    """Bytes that grow with every token, entries and index keys; in records unless told."""
    record = record_bytes(config, caches)
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    return sum((record["entry"] + record["index_key"]) / r for r in ratios)
