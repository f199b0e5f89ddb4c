"""Equality to the last bit, with a message that says where two arrays first differ."""

import numpy as np


def assert_same_bits(actual, expected) -> None:
    """Fail unless both arrays have the same dtype, shape and bits.

    NaNs are equal when their bits are, and 0.0 differs from -0.0. The message names the first
    difference in row-major order, both values, the number of differences and the largest one.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape} is not {expected.shape}"
    width = actual.dtype.itemsize
    bits = [
        np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8).reshape(-1, width)
        for a in (actual, expected)
    ]
    differs = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    if differs.size == 0:
        return
    index = tuple(int(i) for i in np.unravel_index(differs[0], actual.shape))
    distance = np.abs(actual.ravel()[differs].astype(np.float64) - expected.ravel()[differs])
    raise AssertionError(
        f"{differs.size} of {actual.size} elements differ, first at {index}: "
        f"{actual[index]!r} is not {expected[index]!r}; largest difference {distance.max():.3g}"
    )
