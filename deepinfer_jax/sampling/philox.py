"""The Philox4x32-10 counter-based generator on uint32 arrays, and the 64-bit sums it needs.

64-bit types are off in JAX by default, so every 64-bit value is a pair of uint32 (low, high).
"""

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[jax.Array, jax.Array]
Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def split64(value: int) -> np.ndarray:
    """The (low, high) words, uint32 [2], of a Python int taken modulo 2^64."""
    return np.array([value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF], np.uint32)


def add64(pair: Pair, addend: int) -> Pair:
    """Add a Python int to a (low, high) pair of uint32 arrays, modulo 2^64."""
    words = split64(addend)
    low = pair[0] + words[0]
    carry = (low < words[0]).astype(jnp.uint32)
    return low, pair[1] + words[1] + carry


def multiply64(a: jax.Array, constant: int) -> Pair:
    """The full 64-bit product (low, high) of uint32 `a` and a 32-bit constant."""
    # 16-bit halves keep every partial product and every carry inside 32 bits.
    a_low, a_high = a & np.uint32(0xFFFF), a >> np.uint32(16)
    c_low, c_high = np.uint32(constant & 0xFFFF), np.uint32(constant >> 16)
    low_low, high_low, low_high = a_low * c_low, a_high * c_low, a_low * c_high
    middle = (low_low >> np.uint32(16)) + (high_low & np.uint32(0xFFFF)) + low_high
    # middle <= 0xFFFF + 0xFFFF + 0xFFFE0001 = 2^32 - 1, so the sum above cannot wrap.
    high = a_high * c_high + (high_low >> np.uint32(16)) + (middle >> np.uint32(16))
    return a * np.uint32(constant), high


def philox4x32(key: Pair, counter: Words) -> Words:
    """The four output words of Philox4x32-10 (Salmon et al., SC11) for a key and a counter.

    Args:
        key: the 64-bit key as (low, high), uint32 arrays.
        counter: four uint32 arrays, least significant first; broadcast against the key.

    Returns:
        Four uint32 arrays of the broadcast shape, in output order.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for round_index in range(_ROUNDS):
        if round_index:
            k0, k1 = k0 + np.uint32(_KEY_STEPS[0]), k1 + np.uint32(_KEY_STEPS[1])
        low0, high0 = multiply64(c0, _MULTIPLIERS[0])
        low1, high1 = multiply64(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3
