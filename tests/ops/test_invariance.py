"""Every kernel that claims batch invariance, bit by bit: other numbers, places, neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits

from deepinfer_jax.ops import linear, rowwise
from deepinfer_jax.ops.device import KINDS, Device
from deepinfer_jax.ops.experts import ExpertWeights
from deepinfer_jax.ops.rowwise import in_tiles
from deepinfer_jax.ops.sparse_mla import Keys
from deepinfer_jax.ops.table import OPS

MOST = 150
NUMBERS = (1, 37, MOST)
CLAIMS = [k for kernels in OPS.values() for k in kernels if k.batch_invariant and "cpu" in k.on]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def norm_and_softplus(x):
    return jnp.sqrt(jax.nn.softplus(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) + 0.1))


def rows_of(op):
    """The rows of an op's example, [MOST, ...] each, and what runs a kernel on some of them."""
    if op == "rowwise":
        return normal(0, MOST, 100), lambda kernel, x: kernel(norm_and_softplus, x)
    if op == "mhc":
        fn, base, scale = normal(1, 24, 256) * 0.1, normal(2, 24), jnp.ones(3)
        return normal(0, MOST, 4, 64), lambda kernel, x: kernel(
            x, fn, base, scale, iters=20, eps=1e-6
        )
    if op == "linear":
        w = normal(1, 200, 192)
        return normal(0, MOST, 192), lambda kernel, x: kernel(x, w, quantize=True)
    if op == "index_scores":
        keys = jnp.asarray(normal(1, 13, 8, 16))
        table = jnp.arange(1, 13, dtype=jnp.int32).reshape(3, 4)
        number = np.arange(MOST, dtype=np.int32)

        def scores(kernel, rows):
            q, w, slot, visible = rows
            made = kernel(q, w, keys, table, slot, visible)
            return jnp.where(jnp.arange(made.shape[1]) < visible[:, None], made, 0)

        return (normal(0, MOST, 4, 16), normal(2, MOST, 4), number % 3, number % 33), scores
    if op == "topk":
        return np.round(normal(0, MOST, 90)), lambda kernel, x: kernel(x, k=12)
    if op == "sparse_mla":
        pools, sink = (normal(1, 300, 64), normal(2, 80, 64)), normal(3, 8)

        def references(seed, pool, chosen):
            rng = np.random.default_rng(seed)
            at = rng.integers(0, pool, (MOST, chosen), np.int32)
            return at, rng.random((MOST, chosen)) < 0.7

        def attend(kernel, rows):
            q, near, far = rows
            keys = [Keys(jnp.asarray(p), *r) for p, r in zip(pools, (near, far), strict=True)]
            return kernel(q, *keys, sink, scale=0.125)

        return (normal(4, MOST, 8, 64), references(5, 300, 40), references(6, 80, 17)), attend
    assert op == "experts", f"{op} claims batch invariance and has no example here"
    weights = ExpertWeights(
        *map(jnp.asarray, (normal(1, 6, 48, 64), normal(2, 6, 48, 64), normal(3, 6, 64, 48)))
    )
    ids = np.argsort(normal(4, MOST, 6))[:, :3].astype(np.int32)
    common = {"linear": linear.row_tiles, "limit": 3.0, "quantize": False}
    gates = np.abs(normal(5, MOST, 3))
    return (normal(0, MOST, 64), ids, gates), lambda kernel, rows: kernel(
        rows[0], weights, *rows[1:], **common
    )


def differences(kernel):
    """Numbers and orders of rows under which some row's bits are not those among all rows."""
    tree, run = rows_of(kernel.op)
    rows, form = jax.tree.flatten(tree)
    compiled = jax.jit(lambda rows: run(kernel, jax.tree.unflatten(form, rows)))
    expected = [np.asarray(a) for a in jax.tree.leaves(compiled(rows))]
    found = []
    for number in NUMBERS:
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(MOST)[:number]
            made = compiled([a[order] for a in rows])
            try:
                for a, b in zip(jax.tree.leaves(made), expected, strict=True):
                    assert_same_bits(a, b[order])
            except AssertionError as error:
                found.append((number, seed, str(error)))
    return found


@pytest.mark.parametrize("kernel", CLAIMS, ids=lambda k: f"{k.op}.{k.name}")
def test_a_row_has_the_same_bits_in_every_number_order_and_company(kernel):
    assert differences(kernel) == []


def test_the_check_above_finds_a_kernel_that_is_ordered_by_its_number_of_rows():
    assert linear.KERNELS[0].name == "xla" and not linear.KERNELS[0].batch_invariant
    assert differences(linear.KERNELS[0])


@pytest.mark.parametrize("op", OPS)
def test_each_op_has_an_invariant_kernel_on_the_cpu_and_arithmetic_claims_it_nowhere_else(op):
    assert any(k.op == op for k in CLAIMS)
    for kind in set(KINDS) - {"cpu"}:
        fits = [
            k for k in OPS[op] if k.refusal(Device.described(kind), batch_invariant=True) is None
        ]
        assert not fits or op == "topk"


def test_tiles_stop_at_the_rows_that_are_used():
    x = normal(0, 70, 3)
    made = jax.jit(lambda x, used: in_tiles(lambda x: x + 1, x, used, size=16))(x, jnp.int32(20))
    np.testing.assert_array_equal(made[:32], x[:32] + 1)
    np.testing.assert_array_equal(made[32:], np.zeros((38, 3)))


def test_tiles_take_and_give_trees():
    x = {"a": normal(0, 5, 2), "b": jnp.arange(5) > 2, "c": None}
    made = rowwise.tiles(lambda x: (x["a"].sum(-1), ~x["b"], None), x)
    np.testing.assert_allclose(made[0], x["a"].sum(-1), rtol=1e-6)
    np.testing.assert_array_equal(made[1], [True, True, True, False, False])
    assert made[2] is None
