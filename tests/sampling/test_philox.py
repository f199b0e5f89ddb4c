from pathlib import Path

import jax.numpy as jnp
import numpy as np

from deepinfer_jax.sampling.philox import add64, multiply64, philox4x32, split64

GOLDEN = Path(__file__).parents[1] / "golden" / "sampler.npz"


def pairs(values):
    words = np.stack([split64(int(v)) for v in values])
    return jnp.asarray(words[:, 0]), jnp.asarray(words[:, 1])


def joined(pair):
    low, high = (np.asarray(x, np.uint64) for x in pair)
    return [int(v) for v in low | high << np.uint64(32)]


def test_philox_gives_the_known_words():
    with np.load(GOLDEN) as golden:
        key, block = pairs(golden["philox_key"]), pairs(golden["philox_block"])
        words = philox4x32(key, (*block, *pairs(golden["philox_stream"])))
        np.testing.assert_array_equal(np.stack(words, axis=-1), golden["philox_words"])


def test_64_bit_products_and_sums_agree_with_python_integers():
    rng = np.random.default_rng(0)
    values = [0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF, *rng.integers(0, 2**32, 200).tolist()]
    array = jnp.asarray(np.array(values, np.uint32))
    for constant in (3, 0xFFFFFFFF, 0xD2511F53, 0x10001):
        assert joined(multiply64(array, constant)) == [v * constant for v in values]
    wide = [v << 32 | w for v, w in zip(values, reversed(values), strict=True)]
    for addend in (0, 1, 1_000_000_007, 2**64 - 1):
        assert joined(add64(pairs(wide), addend)) == [(v + addend) % 2**64 for v in wide]


def test_splitting_takes_an_integer_modulo_2_to_64():
    assert split64(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert split64(2**64 + 5).tolist() == [5, 0]
