import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits


def test_equal_arrays_pass_even_with_nans():
    values = np.array([[1.0, np.nan], [-0.0, np.inf]], np.float32)
    assert_same_bits(jnp.asarray(values), values)
    assert_same_bits(np.zeros((0, 3)), np.zeros((0, 3)))
    assert_same_bits(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16))


def test_the_first_difference_is_located_and_counted():
    expected = np.zeros((2, 3), np.float32)
    actual = expected.copy()
    actual[1, 0], actual[1, 2] = 1e-45, 0.5
    with pytest.raises(AssertionError, match=r"2 of 6 .* first at \(1, 0\).*difference 0.5"):
        assert_same_bits(actual, expected)


def test_the_sign_of_zero_counts():
    with pytest.raises(AssertionError, match=r"1 of 1 elements differ"):
        assert_same_bits(np.array([0.0]), np.array([-0.0]))


@pytest.mark.parametrize(
    ("actual", "message"),
    [(np.zeros(3, np.float64), "dtype float64"), (np.zeros(4, np.float32), "shape")],
)
def test_another_dtype_or_shape_is_named(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, np.zeros(3, np.float32))
