"""Two traces held against each other: the first array, in the order of the data, that differs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

# The order in which a layer computes its arrays; the first that differs is nearest the cause.
_IN_LAYER = (
    "engram_rows engram_gate engram_out attn_pre attn_post attn_comb attn_in window_kv latent "
    "compress_kv index_k index_q candidates topk attn_o attn_out ffn_in route_idx route_w ffn_out "
    "stream pre_next"
).split()
_BEFORE = ("token_ids", "prefill_len", "embed", "engram_hash", *_IN_LAYER[:3])
_AFTER = ("main_hidden", "final_hidden", "logits")
_INTEGERS, _NUMBERS = "biu", "biuf"  # NumPy's kinds; others, such as texts, have no distance


@dataclass(frozen=True)
class Row:
    """How one array differs.

    Attributes:
        name: of the array.
        shape: in the first trace.
        differing: how many elements differ by more than the tolerance.
        max_abs: largest absolute difference; inf when the shapes differ, or when texts do.
        where: index of the largest difference; () when the shapes differ.
    """

    name: str
    shape: tuple[int, ...]
    differing: int
    max_abs: float
    where: tuple[int, ...]


def data_order(name: str) -> tuple[int, int, str]:
    """Sort key that puts arrays in the order in which a forward computes them."""
    layer, dot, kind = name.partition(".")
    if dot and layer[:1] == "L" and layer[1:].isdigit():
        inner = _IN_LAYER.index(kind) if kind in _IN_LAYER else len(_IN_LAYER)
        return int(layer[1:]), inner, kind
    if name in _BEFORE:
        return -1, _BEFORE.index(name), name
    return 1 << 20, _AFTER.index(name) if name in _AFTER else len(_AFTER), name


def compare(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], *, tolerance: float = 0.0
) -> list[Row]:
    """Rows of the arrays that both traces have and that differ, in the order of the data.

    Arrays of texts are compared too; no tolerance makes two texts equal.
    """
    rows = []
    for name in sorted(set(a) & set(b), key=data_order):
        x, y = np.asarray(a[name]), np.asarray(b[name])
        if x.shape != y.shape:
            rows.append(Row(name, x.shape, x.size, float("inf"), ()))
            continue
        delta = _distance(x, y)
        count = int((delta > tolerance).sum())
        if count:
            where = np.unravel_index(int(delta.argmax()), delta.shape)
            rows.append(Row(name, x.shape, count, float(delta.max()), tuple(int(i) for i in where)))
    return rows


def _distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far apart the elements are, float64; inf between what has no finite distance."""
    if x.dtype.kind not in _NUMBERS or y.dtype.kind not in _NUMBERS:
        return np.where(x == y, 0.0, np.inf)
    with np.errstate(invalid="ignore"):  # infinity less infinity is NaN, settled below
        delta = np.abs(x.astype(np.float64) - y.astype(np.float64))
    # NaN against NaN is equal, NaN against a number differs by any measure.
    delta = np.where(np.isnan(delta), np.where(np.isnan(x) & np.isnan(y), 0, np.inf), delta)
    delta = np.where(x == y, 0, delta)  # equal infinities
    if x.dtype.kind in _INTEGERS and y.dtype.kind in _INTEGERS:
        delta = np.maximum(delta, x != y)  # large integers, such as seeds, may round to one float
    return delta
