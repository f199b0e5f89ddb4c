"""Rows for every op of the kernel table, in the formats that an engine gives them.

An op that is added to the table needs an example here before a kernel of it can claim that a row
does not depend on its batch (`tests/ops/test_batch_invariance.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.ops import linear, quant
from deepinfer_jax.ops.experts import ExpertWeights
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.packed import Packed, Turned, Weight
from deepinfer_jax.ops.sparse_mla import Keys

MOST = 256  # rows of an example
EXPERTS = 6
BF16 = jnp.dtype(jnp.bfloat16)
F32 = jnp.dtype(jnp.float32)


@dataclass(frozen=True)
class Example:
    """Rows of one op, and how a kernel runs on any of them.

    Attributes:
        rows: a tree of arrays [MOST, ...].
        padding: rows that a step may hold beside them, a tree of the same shapes.
        run: (kernel, rows) -> a tree of arrays with one row for each.
        elsewhere: the same rows and results where the pool that they read holds other things in
            other places; None of an op that reads none.
    """

    rows: Any
    padding: Any
    run: Callable[[Kernel, Any], Any]
    elsewhere: "Example | None" = None


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def spoilt(rows: Any) -> Any:
    """NaN in place of every number."""
    return jax.tree.map(lambda a: np.full_like(a, np.nan), rows)


def plain(*shape: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(normal(seed, *shape))


def turned(*shape: int, seed: int = 1) -> Turned:
    return Turned(jnp.swapaxes(plain(*shape, seed=seed), -1, -2))


def fp8(*shape: int, seed: int = 1) -> Packed:
    *_, o, i = shape
    scale = np.random.default_rng(seed).integers(119, 123, (*shape[:-2], o // 32, i // 32))
    return Packed(plain(*shape, seed=seed).astype(jnp.float8_e4m3fn), jnp.asarray(scale, jnp.uint8))


def fp4(*shape: int, seed: int = 1) -> Packed:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2))
    scale = rng.integers(119, 123, (*shape[:-1], shape[-1] // 32))
    return Packed(jnp.asarray(codes, jnp.uint8), jnp.asarray(scale, jnp.uint8))


def of_rowwise() -> Example:
    def norm_and_softplus(x: jax.Array) -> jax.Array:
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))
        return jnp.sqrt(jax.nn.softplus(scaled) + 0.1)

    rows = normal(0, MOST, 100)
    return Example(rows, spoilt(rows), lambda kernel, x: kernel(norm_and_softplus, x))


def of_mhc() -> Example:
    rows, fn, base = normal(0, MOST, 4, 64), normal(1, 24, 256) * 0.1, normal(2, 24)

    def run(kernel: Kernel, x: jax.Array) -> Any:
        return kernel(x, fn, base, jnp.ones(3), iters=20, eps=1e-6)

    return Example(rows, spoilt(rows), run)


def of_linear(weight: Callable[..., Weight], dtype: jnp.dtype, quantize: bool) -> Example:
    rows = np.asarray(normal(0, MOST, 192), dtype)
    w = weight(224, 192)
    return Example(rows, spoilt(rows), lambda kernel, x: kernel(x, w, quantize=quantize))


def of_index_scores(dtype: jnp.dtype, round_scores: bool) -> Example:
    """Three sequences of 640 entries, which are two blocks of a row that sees more than 512."""
    slots, pages, c, k = 3, 10, 64, 32
    number = np.arange(MOST, dtype=np.int32)
    keys = plain(slots * pages + 1, c, k)
    decode: quant.Decode = quant.numbers
    if round_scores:
        keys, decode = quant.encode_fp4(keys), quant.decode_fp4
    table = np.arange(1, slots * pages + 1, dtype=np.int32).reshape(slots, pages)
    q, w = np.asarray(normal(2, MOST, 4, k), dtype), np.asarray(normal(3, MOST, 4), dtype)
    slot, visible = number % slots, (number * 37) % (pages * c + 1)
    # A padding row sees nothing.
    padding = (*spoilt((q, w)), np.zeros_like(slot), np.zeros_like(visible))

    def example(keys: Any, table: Any, slot: Any, elsewhere: Example | None) -> Example:
        def run(kernel: Kernel, rows: Any) -> Any:
            made = kernel(
                rows[0],
                rows[1],
                jnp.asarray(keys),
                jnp.asarray(table),
                *rows[2:],
                round_scores=round_scores,
                decode=decode,
            )
            return jnp.where(jnp.arange(made.shape[1]) < rows[3][:, None], made, 0)

        return Example((q, w, slot, visible), padding, run, elsewhere)

    # Other sequences between these, other pages, and pages of nobody that hold no numbers.
    place = np.random.default_rng(4).permutation(90)[: slots * pages + 1].astype(np.int32)
    other = np.full((90, *keys.shape[1:]), 255 if round_scores else np.nan, keys.dtype)
    other[place] = keys
    tables = np.zeros((2 * slots, pages), np.int32)
    tables[1::2] = place[table]
    return example(keys, table, slot, example(other, tables, 2 * slot + 1, None))


def of_topk() -> Example:
    rows = np.round(normal(0, MOST, 90))
    return Example(rows, spoilt(rows), lambda kernel, x: kernel(x, k=12))


def of_sparse_mla(dtype: jnp.dtype, records: bool, entries: bool) -> Example:
    sizes, chosen, k = (300, 80), (40, 17), 64
    pools: list[Any] = [plain(size, k, seed=i) for i, size in enumerate(sizes)]
    decodes: list[quant.Decode] = [quant.numbers, quant.numbers]
    if records:
        pools = [quant.encode_fp8(pools[0]), quant.encode_fp4_e4m3(pools[1])]
        decodes = [quant.decode_fp8, quant.decode_fp4_e4m3]
    sink = normal(3, 8)
    q = np.asarray(normal(4, MOST, 8, k), dtype)
    references = []
    for i, (size, count) in enumerate(zip(sizes, chosen, strict=True)):
        rng = np.random.default_rng(5 + i)
        at = rng.integers(0, size, (MOST, count), np.int32)
        references.append((at, rng.random((MOST, count)) < 0.7))
    padding = spoilt(q), [(at[::-1], np.zeros_like(seen)) for at, seen in references]

    def example(pools: Any, references: Any, elsewhere: Example | None) -> Example:
        def run(kernel: Kernel, rows: Any) -> Any:
            q, references = rows
            keys = [
                Keys(jnp.asarray(pool), *own, decode=decode)
                for pool, own, decode in zip(pools, references, decodes, strict=True)
            ]
            return kernel(q, keys[0], keys[1] if entries else None, sink, scale=0.125)

        return Example((q, references), padding, run, elsewhere)

    moved, aimed = [], []
    for pool, (at, seen) in zip(pools, references, strict=True):
        size, stored = 2 * pool.shape[0], pool.shape[1]
        place = np.random.default_rng(8).permutation(size)[: pool.shape[0]].astype(np.int32)
        other = np.full((size, stored), 255 if records else np.nan, pool.dtype)
        other[place] = pool
        # What a row does not see may point anywhere.
        aimed.append((np.where(seen, place[at], np.int32(10**6)), seen))
        moved.append(other)
    return example(pools, references, example(moved, aimed, None))


def of_experts(weight: Callable[..., Weight], dtype: jnp.dtype, quantize: bool) -> Example:
    width, inner, k = 64, 96, 3
    weights = ExpertWeights(
        weight(EXPERTS, inner, width, seed=1),
        weight(EXPERTS, inner, width, seed=2),
        weight(EXPERTS, width, inner, seed=3),
    )
    x, gates = np.asarray(normal(0, MOST, width), dtype), np.abs(normal(5, MOST, k))
    ids = np.argsort(normal(4, MOST, EXPERTS))[:, :k].astype(np.int32)
    common = {"limit": 3.0, "quantize": quantize}

    def run(kernel: Kernel, rows: Any) -> Any:
        x, ids, gates = rows
        product = linear.row_tiles if kernel.batch_invariant else linear.xla
        return kernel(x, weights, ids, gates, linear=product, **common)

    # No expert takes a padding row.
    return Example((x, ids, gates), (spoilt(x), np.full_like(ids, EXPERTS), spoilt(gates)), run)


# Op -> its examples by name; the first is checked with the most numbers of rows.
EXAMPLES: dict[str, dict[str, Callable[[], Example]]] = {
    "rowwise": {"f32": of_rowwise},
    "mhc": {"f32": of_mhc},
    "linear": {
        "f32": lambda: of_linear(plain, F32, False),
        "turned": lambda: of_linear(turned, F32, False),
        "fp8": lambda: of_linear(fp8, BF16, True),
        "fp4": lambda: of_linear(fp4, BF16, True),
    },
    "index_scores": {
        "f32": lambda: of_index_scores(F32, False),
        "records": lambda: of_index_scores(BF16, True),
    },
    "topk": {"f32": of_topk},
    "sparse_mla": {
        "f32": lambda: of_sparse_mla(F32, False, True),
        "window": lambda: of_sparse_mla(F32, False, False),
        "records": lambda: of_sparse_mla(BF16, True, True),
    },
    "experts": {
        "f32": lambda: of_experts(plain, F32, False),
        "turned": lambda: of_experts(turned, F32, False),
        "fp4": lambda: of_experts(fp4, BF16, True),
    },
}
