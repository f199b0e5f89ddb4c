import ml_dtypes
import numpy as np
import pytest

from deepinfer_jax.checkpoint import formats
from deepinfer_jax.errors import CheckpointError

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.fixture(scope="module")
def vectors(golden):
    return np.load(golden / "formats.npz")


def bits(x):
    return x.view(np.uint8)


def slow_e4m3(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def slow_e2m1(code):
    return (-1 if code & 8 else 1) * E2M1[code & 7]


def test_q8_quantizes_as_the_golden_weights(vectors):
    codes, scales = formats.encode_q8(vectors["w"])
    np.testing.assert_array_equal(bits(codes), vectors["w_fp8"])
    np.testing.assert_array_equal(bits(scales), vectors["w_fp8_scale"])


def test_q4_quantizes_as_the_golden_weights(vectors):
    codes, scales = formats.encode_q4(vectors["w"])
    np.testing.assert_array_equal(codes, vectors["w_fp4"])
    np.testing.assert_array_equal(bits(scales), vectors["w_fp4_scale"])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_decoding_gives_the_golden_values(vectors, dtype):
    q8 = formats.decode_q8("w", vectors["w_fp8"], vectors["w_fp8_scale"], dtype)
    q4 = formats.decode_q4("w", vectors["w_fp4"], vectors["w_fp4_scale"], dtype)
    assert q8.dtype == q4.dtype == dtype
    np.testing.assert_array_equal(q8.astype(np.float32), vectors["w_fp8_dequant"])
    np.testing.assert_array_equal(q4.astype(np.float32), vectors["w_fp4_dequant"])


def test_rows_decode_as_the_golden_activations(vectors):
    rows = formats.decode_rows("x", vectors["fp8_codes"], vectors["fp8_scale_e8m0"], np.float32)
    np.testing.assert_array_equal(rows, vectors["fp8_dequant"])
    codes, scales = formats.encode_rows(vectors["x_bf16_as_f32"])
    np.testing.assert_array_equal(bits(codes), vectors["fp8_codes"])
    np.testing.assert_array_equal(bits(scales), vectors["fp8_scale_e8m0"])


def test_every_e4m3_code_decodes_to_its_definition():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], np.uint8).reshape(8, 32)
    scales = np.arange(120, 128, dtype=np.uint8).reshape(8, 1)
    got = formats.decode_rows("x", codes, scales, np.float32)
    wanted = [[slow_e4m3(c) * 2.0 ** (120 + r - 127) for c in codes[r].tolist()] for r in range(8)]
    np.testing.assert_array_equal(got, wanted)


def test_the_low_nibble_is_the_even_input():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.full((16, 1), 130, np.uint8)
    got = formats.decode_q4("x", codes.view(np.int8), scales, np.float32)
    np.testing.assert_array_equal(got[:, 0::2], [[8 * slow_e2m1(c & 15) for c in r] for r in codes])
    np.testing.assert_array_equal(got[:, 1::2], [[8 * slow_e2m1(c >> 4) for c in r] for r in codes])


def test_a_q8_scale_covers_its_own_block():
    codes = np.full((64, 96), 0x38, np.uint8)  # 1.0
    scales = 120 + np.arange(6, dtype=np.uint8).reshape(2, 3)
    got = formats.decode_q8("x", codes, scales, np.float32)
    wanted = np.kron(2.0 ** (scales.astype(float) - 127), np.ones((32, 32)))
    np.testing.assert_array_equal(got, wanted)


def test_more_rows_than_are_decoded_at_once():
    rng = np.random.default_rng(1)
    w = rng.standard_normal((2080, 64)).astype(np.float32)
    codes, scales = formats.encode_q8(w)
    whole = formats.decode_q8("w", codes, scales, np.float32)
    for begin in (0, 992, 1024, 2048):
        rows = slice(begin, begin + 32)
        block = slice(begin // 32, begin // 32 + 1)
        part = formats.decode_q8("w", codes[rows], scales[block], np.float32)
        np.testing.assert_array_equal(whole[rows], part)
    assert np.abs(whole - w).max() < np.abs(w).max() / 16


@pytest.mark.parametrize("encode", [formats.encode_q8, formats.encode_q4, formats.encode_rows])
def test_quantizing_twice_changes_no_value(encode):
    decode = {"encode_q8": formats.decode_q8, "encode_q4": formats.decode_q4}
    decode = decode.get(encode.__name__, formats.decode_rows)
    w = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32)
    once = decode("w", *encode(w), np.float32)
    np.testing.assert_array_equal(decode("w", *encode(once), np.float32), once)


def test_zeros_stay_zeros():
    zeros = np.zeros((32, 64), np.float32)
    assert not formats.decode_q8("w", *formats.encode_q8(zeros)).any()
    assert not formats.decode_q4("w", *formats.encode_q4(zeros)).any()


def refusal(function, *args):
    with pytest.raises(CheckpointError) as caught:
        function(*args)
    assert caught.value.why and caught.value.do
    return caught.value.what


@pytest.mark.parametrize("decode", [formats.decode_q8, formats.decode_rows, formats.decode_q4])
def test_scale_255_is_refused_by_name_and_index(decode):
    rows = 2 if decode is formats.decode_q8 else 64
    codes = np.zeros((64, 64 if decode is formats.decode_q4 else 128), np.uint8)
    scales = np.full((rows, 4), 127, np.uint8)
    scales[1, 2] = 255
    said = refusal(decode, "layers.0.attn.wkv.scale", codes, scales)
    assert said == "layers.0.attn.wkv.scale holds 1 scales of code 255, the first at [1, 2]."


def test_a_nan_code_is_refused_by_name_and_index():
    codes = np.zeros((64, 32), np.uint8)
    codes[40, 7] = 0xFF
    said = refusal(formats.check_codes, "w", codes)
    assert said == "w holds an E4M3 code that is not a number at [40, 7]."
    scales = np.full((2, 1), 127, np.uint8)
    assert "w decodes to nan at [40, 7]" in refusal(formats.decode_q8, "w", codes, scales)


def test_a_value_that_bf16_cannot_hold_is_refused():
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 3] = 1  # 2^-9
    tiny = np.array([[0]], np.uint8)  # 2^-127
    assert formats.decode_rows("w", codes, tiny, np.float32)[0, 3] == 2.0**-136
    assert "at [0, 3]" in refusal(formats.decode_rows, "w", codes, tiny)
    codes[0, 5] = 0x7E  # 448
    huge = np.array([[254]], np.uint8)
    assert "w decodes to inf at [0, 5]" in refusal(formats.decode_rows, "w", codes, huge)


def test_extreme_scales_that_fit_are_decoded():
    codes = np.full((1, 32), 0x38, np.uint8)
    for scale in (0, 254):
        got = formats.decode_rows("w", codes, np.array([[scale]], np.uint8))
        assert float(got[0, 0]) == 2.0 ** (scale - 127)


def test_scales_of_another_shape_are_refused():
    said = refusal(formats.decode_q8, "w", np.zeros((64, 64), np.uint8), np.zeros((2, 3), np.uint8))
    assert said == "w has codes for [64, 64] weights and scales [2, 3]."


@pytest.mark.parametrize("shape", [(33, 32), (32, 48), (32,)])
def test_partial_blocks_are_refused(shape):
    said = refusal(formats.encode_q8, np.zeros(shape, np.float32))
    assert f"Weights of shape {list(shape)} cannot be quantized" in said


def test_weights_that_are_not_finite_are_refused():
    w = np.zeros((32, 32), np.float32)
    w[3, 4] = np.inf
    assert "hold 1 values that are not finite" in refusal(formats.encode_q4, w)
