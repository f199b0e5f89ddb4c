"""The release's number formats as NumPy arrays: exact decoding, and the weight quantizers.

Q8: E4M3 codes with one E8M0 scale per 32x32 block. Q4: two E2M1 codes a byte (even input in the
low nibble) with one E8M0 scale per 32 inputs. Engram rows: E4M3 codes with one E8M0 scale per 32
channels of a row. An E8M0 byte b is 2^(b-127), and 255 is not a number.
"""

import ml_dtypes
import numpy as np

from deepinfer_jax.errors import CheckpointError

GROUP = 32  # channels that share a scale, in every format here

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_E8M0_NAN = 255
_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_AMAX_FLOOR_8 = 1e-4
_AMAX_FLOOR_4 = 6 * 2.0**-126
_ROWS = 1024  # decoded at once, so that float32 scratch stays small; a multiple of GROUP

# Between these scale bytes every E4M3 or E2M1 value times its scale is a BF16 number: 2^-9 times
# the smallest scale is not below BF16's last bit, 448 times the largest does not overflow.
_SAFE = (3, 246)


def check_scales(name: str, scales: np.ndarray, rows: np.ndarray | None = None) -> None:
    """Raise CheckpointError if an E8M0 array [n, m] holds code 255, naming its first index.

    `rows` [n] are the row numbers in the stored tensor, when `scales` is a selection of it.
    """
    wrong = np.argwhere(scales.view(np.uint8) == _E8M0_NAN)
    if len(wrong):
        row, column = (int(n) for n in wrong[0])
        row = row if rows is None else int(rows[row])
        raise CheckpointError(
            f"{name} holds {len(wrong)} scales of code 255, the first at [{row}, {column}].",
            "An E8M0 code of 255 is not a number, and its whole group of weights would be lost.",
            "Download or export the checkpoint again.",
        )


def check_codes(name: str, codes: np.ndarray) -> None:
    """Raise CheckpointError if an E4M3 array [o, i] holds a NaN code, naming its first index."""
    for begin in range(0, len(codes), _ROWS):
        part = codes[begin : begin + _ROWS].view(np.uint8)
        wrong = np.argwhere((part & 0x7F) == 0x7F)
        if len(wrong):
            row, column = (int(n) for n in wrong[0])
            raise CheckpointError(
                f"{name} holds an E4M3 code that is not a number at [{begin + row}, {column}].",
                "The weight would turn every activation that it meets into NaN.",
                "Download or export the checkpoint again.",
            )


def decode_q8(
    name: str, codes: np.ndarray, scales: np.ndarray, dtype: np.typing.DTypeLike = _BF16
) -> np.ndarray:
    """The weights of a Q8 linear, exactly.

    `codes` [o, i] E4M3 (or uint8), `scales` [o/32, i/32] E8M0 (or uint8); returns [o, i] BF16 or
    float32. Raises CheckpointError naming `name` for a NaN code or scale, or a product that
    `dtype` cannot hold.
    """
    return _decode(name, codes, scales, GROUP, np.dtype(dtype))


def decode_rows(
    name: str, codes: np.ndarray, scales: np.ndarray, dtype: np.typing.DTypeLike = _BF16
) -> np.ndarray:
    """Engram rows, exactly: `codes` [n, c] E4M3, `scales` [n, c/32] E8M0 -> [n, c].

    Types and errors as `decode_q8`.
    """
    return _decode(name, codes, scales, 1, np.dtype(dtype))


def decode_q4(
    name: str, codes: np.ndarray, scales: np.ndarray, dtype: np.typing.DTypeLike = _BF16
) -> np.ndarray:
    """The weights of a Q4 linear, exactly.

    `codes` [o, i/2] int8 or uint8, `scales` [o, i/32] E8M0 (or uint8); returns [o, i] BF16 or
    float32. Errors as `decode_q8`.
    """
    return _decode(name, codes, scales, 1, np.dtype(dtype), packed=True)


def encode_q8(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weights [o, i] to E4M3 codes [o, i] and E8M0 scales [o/32, i/32].

    Scale: the power of two not below max(amax, 1e-4) / 448 in float32, amax over the block. Code:
    w / scale, clipped to +-448, rounded to nearest even.
    """
    return _encode_e4m3(weights, GROUP)


def encode_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize Engram rows [n, c] to E4M3 codes [n, c] and E8M0 scales [n, c/32].

    The rule of `encode_q8` with groups of 32 channels of one row.
    """
    return _encode_e4m3(rows, 1)


def encode_q4(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize weights [o, i] to packed E2M1 codes [o, i/2] uint8 and E8M0 scales [o, i/32].

    Scale: the power of two not below max(amax, 6 * 2^-126) / 6 in float32, amax over 32 inputs.
    Code: w / scale, clipped to +-6, rounded to nearest, ties to the even code.
    """
    groups = _groups(weights, 1)
    amax = np.abs(groups).max((1, 3))
    scales = _ceil_power_of_two(
        np.maximum(amax, np.float32(_AMAX_FLOOR_4)) * np.float32(1 / _E2M1_MAX)
    )
    scaled = groups / scales.astype(np.float32)[:, None, :, None]
    codes = scaled.clip(-_E2M1_MAX, _E2M1_MAX).astype(_E2M1).view(np.uint8) & 0xF
    codes = codes.reshape(weights.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def _encode_e4m3(weights: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    groups = _groups(weights, rows)
    amax = np.abs(groups).max((1, 3))
    scales = _ceil_power_of_two(
        np.maximum(amax, np.float32(_AMAX_FLOOR_8)) * np.float32(1 / _E4M3_MAX)
    )
    scaled = groups / scales.astype(np.float32)[:, None, :, None]
    codes = scaled.clip(-_E4M3_MAX, _E4M3_MAX).astype(_E4M3)
    return codes.reshape(weights.shape), scales


def _groups(weights: np.ndarray, rows: int) -> np.ndarray:
    """[o, i] -> float32 [o/rows, rows, i/32, 32]."""
    if weights.ndim != 2 or weights.shape[0] % rows or weights.shape[1] % GROUP:
        raise CheckpointError(
            f"Weights of shape {list(weights.shape)} cannot be quantized in {rows}x{GROUP} blocks.",
            "Every block has one scale, and there are no partial blocks in the release formats.",
            f"Use widths that are multiples of {GROUP}.",
        )
    weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise CheckpointError(
            f"Weights of shape {list(weights.shape)} hold "
            f"{int((~np.isfinite(weights)).sum())} values that are not finite.",
            "The release formats have no infinity, and a NaN would spread to its whole block.",
            "Find where training or conversion produced it.",
        )
    o, i = weights.shape
    return weights.reshape(o // rows, rows, i // GROUP, GROUP)


def _ceil_power_of_two(x: np.ndarray) -> np.ndarray:
    """The E8M0 code of the least power of two >= `x` (positive, normal float32), from its bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint8).view(_E8M0)


def _decode(
    name: str,
    codes: np.ndarray,
    scales: np.ndarray,
    rows: int,
    dtype: np.dtype,
    *,
    packed: bool = False,
) -> np.ndarray:
    """Codes times scales; one scale covers `rows` rows and 32 channels."""
    o, i = codes.shape[0], codes.shape[1] * (2 if packed else 1)
    if scales.shape != (o // rows, i // GROUP) or o % rows or i % GROUP:
        raise CheckpointError(
            f"{name} has codes for [{o}, {i}] weights and scales {list(scales.shape)}.",
            f"One scale covers {rows}x{GROUP} weights.",
            "Download or export the checkpoint again.",
        )
    check_scales(name, scales)
    scales = scales.view(np.uint8)
    safe = not scales.size or (scales.min() >= _SAFE[0] and scales.max() <= _SAFE[1])
    factors = scales.view(_E8M0).astype(np.float32)
    out = np.empty((o, i), dtype)
    for begin in range(0, o, _ROWS):
        part = codes[begin : begin + _ROWS]
        if packed:
            bytes_ = part.view(np.uint8)
            nibbles = np.stack([bytes_ & 0xF, bytes_ >> 4], -1).reshape(len(part), i)
            values = nibbles.view(_E2M1).astype(np.float32)
        else:
            values = part.view(_E4M3).astype(np.float32)
        groups = values.reshape(-1, rows, i // GROUP, GROUP)
        # An overflow is reported below with the tensor's name, not as a NumPy warning.
        with np.errstate(over="ignore"):
            groups *= factors[begin // rows : (begin + _ROWS) // rows, None, :, None]
        out[begin : begin + _ROWS] = values
        finite = np.isfinite(values).all()
        if not finite or not (safe or np.array_equal(out[begin : begin + _ROWS], values)):
            kept = out[begin : begin + _ROWS].astype(np.float32)
            row, column = np.argwhere(~np.isfinite(values) | (kept != values))[0]
            raise CheckpointError(
                f"{name} decodes to {values[row, column]} at [{begin + row}, {column}].",
                f"That is no finite {dtype} number, so the weight would not be the stored one.",
                "Download or export the checkpoint again.",
            )
    return out
