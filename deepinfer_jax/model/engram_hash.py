"""Engram's n-gram hash: the constants a config fixes, and table rows from token ids alone.

Follows the model specification, section "Hash". The constants are host integers; a row's hash is
below 2^63, so on devices without 64-bit integers it is computed on the host (`hash_rows`).
"""

from dataclasses import dataclass

import numpy as np

from deepinfer_jax.config import ModelConfig

_SEED_STEP = 10007  # per-layer seed of the multipliers; part of the numerics


@dataclass(frozen=True)
class EngramHash:
    """Constants of every Engram layer, in `engram_layer_ids` order.

    Attributes:
        multipliers: int64 [layers, max_ngram], odd.
        primes: int64 [layers, columns], one table size per (order, head), order-major.
        offsets: int64 [layers, columns], first row of each column's table.
    """

    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each layer's table."""
        return tuple(int(n) for n in self.primes.sum(axis=1))


def _is_prime(n: int) -> bool:
    if n < 4:
        return n > 1
    if n % 2 == 0 or n % 3 == 0:
        return False
    return all(n % d and n % (d + 2) for d in range(5, int(n**0.5) + 1, 6))


def engram_hash(config: ModelConfig) -> EngramHash:
    """The hash constants of `config` (model specification, section "Hash")."""
    layers, order = len(config.engram_layer_ids), config.engram_max_ngram_size
    columns = config.engram_columns
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    multipliers = np.zeros((layers, order), np.int64)
    primes = np.zeros((layers, columns), np.int64)
    used: set[int] = set()
    for row, layer in enumerate(config.engram_layer_ids):
        draws = np.random.default_rng(_SEED_STEP * layer).integers(0, bound, order, np.int64)
        multipliers[row] = 2 * draws + 1
        for ngram in range(order - 1):
            running = config.engram_vocab_size - 1
            for head in range(config.engram_n_heads):
                running += 1
                while running in used or not _is_prime(running):
                    running += 1
                used.add(running)
                primes[row, ngram * config.engram_n_heads + head] = running
    offsets = np.cumsum(primes, axis=1) - primes
    return EngramHash(multipliers, primes, offsets)


def hash_rows(constants: EngramHash, compressed: np.ndarray, pad: int) -> np.ndarray:
    """Table rows of every position of one or more sequences.

    Args:
        constants: from `engram_hash`.
        compressed: int [..., t], compressed token ids; -1 marks a position of an image span, which
            blocks every look-back through it. The sequence starts at index 0.
        pad: compressed id that stands for what lies before the start or beyond a block.

    Returns:
        int32 [..., t, layers, columns]. Rows of image positions are hashed as all pad.
    """
    compressed = np.asarray(compressed, np.int64)
    layers, order = constants.multipliers.shape
    t = compressed.shape[-1]
    heads = constants.primes.shape[1] // (order - 1)
    blocked = np.zeros(compressed.shape, bool)
    acc = np.zeros((*compressed.shape, layers), np.int64)
    out = np.zeros((*compressed.shape, layers, constants.primes.shape[1]), np.int64)
    for step in range(order):
        shifted = np.full_like(compressed, -1)
        if step < t:
            shifted[..., step:] = compressed[..., : t - step]
        blocked |= shifted < 0
        ids = np.where(blocked, pad, shifted)
        acc ^= ids[..., None] * constants.multipliers[:, step]
        if step:
            columns = slice((step - 1) * heads, step * heads)
            out[..., columns] = (
                acc[..., None] % constants.primes[:, columns] + constants.offsets[:, columns]
            )
    return out.astype(np.int32)
