import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.ops import quant


@pytest.fixture(scope="module")
def formats(golden):
    return np.load(golden / "formats.npz")


CASES = [
    (quant.qdq_fp8, "fp8_dequant"),
    (quant.qdq_fp4, "fp4_e8m0_dequant"),
    (quant.qdq_fp4_e4m3, "fp4_e4m3_dequant"),
]


@pytest.mark.parametrize(("function", "name"), CASES, ids=lambda c: getattr(c, "__name__", c))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rounding_equals_the_reference_exactly(formats, function, name, dtype):
    x = jnp.asarray(formats["x_bf16_as_f32"]).astype(dtype)
    made = jax.jit(function)(x)
    assert made.dtype == dtype
    np.testing.assert_array_equal(np.asarray(made, np.float32), formats[name])


def test_fp8_codes_and_scales_equal_the_reference(formats):
    codes, exponent = quant.quantize_fp8(jnp.asarray(formats["x_bf16_as_f32"]))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), formats["fp8_codes"])
    np.testing.assert_array_equal(exponent, formats["fp8_scale_e8m0"])


@pytest.mark.parametrize("function", [quant.qdq_fp8, quant.qdq_fp4], ids=lambda f: f.__name__)
def test_rounding_twice_is_rounding_once(function):
    x = jax.random.normal(jax.random.key(3), (64, 128)) * jnp.exp2(
        jax.random.randint(jax.random.key(4), (64, 1), -20, 8).astype(jnp.float32)
    )
    once = function(x)
    np.testing.assert_array_equal(function(once), once)


@pytest.mark.parametrize(
    ("tie", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)]
)
def test_fp4_ties_go_to_the_even_code(tie, even):
    # The 6 fixes the scale at one.
    x = jnp.zeros(32).at[0].set(6.0).at[1].set(tie).at[2].set(-tie)
    np.testing.assert_array_equal(quant.qdq_fp4(x)[:3], [6, even, -even])


def test_zero_stays_zero():
    for function, _ in CASES:
        np.testing.assert_array_equal(function(jnp.zeros((2, 64))), jnp.zeros((2, 64)))


RECORDS = [
    (quant.encode_fp8, quant.decode_fp8, quant.qdq_fp8, ("fp8_codes", "fp8_scale_e8m0")),
    (quant.encode_fp4, quant.decode_fp4, quant.qdq_fp4, ("fp4_e8m0_packed", "fp4_e8m0_scale")),
    (
        quant.encode_fp4_e4m3,
        quant.decode_fp4_e4m3,
        quant.qdq_fp4_e4m3,
        ("fp4_e4m3_packed", "fp4_e4m3_scale"),
    ),
]
RECORD_IDS = [names[0] for *_, names in RECORDS]


@pytest.mark.parametrize(("encode", "decode", "qdq", "names"), RECORDS, ids=RECORD_IDS)
def test_records_are_the_codes_and_scales_of_the_reference(formats, encode, decode, qdq, names):
    x = jnp.asarray(formats["x_bf16_as_f32"])
    record = jax.jit(encode)(x)
    assert_same_bits(record, np.concatenate([formats[name] for name in names], -1))
    assert_same_bits(jax.jit(decode, static_argnums=1)(record, jnp.float32), qdq(x))


def extremes():
    """Groups of every magnitude that float32 has, zeros of both signs, ties and one-sided ones."""
    key = jax.random.key(7)
    x = np.array(jax.random.normal(key, (300, 64)))
    x *= np.exp2(np.linspace(-140, 126, 300, dtype=np.float64))[:, None].astype(np.float32)
    x[:40] = np.round(np.clip(x[150:190] / np.abs(x[150:190]).max() * 24, -24, 24)) / 4
    x[5], x[6], x[7, ::2] = 0.0, -0.0, 0.0
    x[8], x[8, 3] = 0.0, -1e-30
    return jnp.asarray(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("encode", "decode", "qdq", "names"), RECORDS, ids=RECORD_IDS)
def test_a_record_gives_the_bits_of_the_rounded_values(encode, decode, qdq, names, dtype):
    x = extremes().astype(dtype)
    made = jax.jit(lambda x: decode(encode(x), dtype))(x)
    assert_same_bits(made, jax.jit(qdq)(x))
    # As numbers of either type, caches hold what the record says.
    for held in (jnp.float32, jnp.bfloat16):
        assert_same_bits(jax.jit(lambda x, held=held: qdq(x).astype(held).astype(dtype))(x), made)


@pytest.mark.parametrize(("encode", "decode", "qdq", "names"), RECORDS, ids=RECORD_IDS)
def test_a_value_that_is_no_number_survives_in_a_record(encode, decode, qdq, names):
    x = np.array(extremes()[158:163])
    bad = np.arange(1, 4)
    x[bad, 3] = np.nan, np.inf, -np.inf
    rounded, made = jax.jit(lambda x: (qdq(x), decode(encode(x), x.dtype)))(x)
    np.testing.assert_array_equal(made, rounded)
    assert not np.isfinite(made[bad, 3]).any() and np.isfinite(np.asarray(made)[[0, 4]]).all()


def test_every_e2m1_code_has_its_value():
    packed = jnp.asarray(
        [[low | high << 4 for low, high in zip(range(16), range(15, -1, -1), strict=True)]]
    )
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = np.asarray([*magnitudes, *(-m for m in map(float, magnitudes))], np.float32)
    expected = np.stack([values, values[::-1]], -1).reshape(1, 32)
    assert_same_bits(quant.e2m1_values(packed.astype(jnp.uint8)), expected)
