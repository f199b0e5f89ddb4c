"""Every kernel that claims batch invariance, bit by bit: other numbers, places, neighbours.

The kernels come from the kernel table and the rows from `op_examples`, so that a claim without an
example fails. `pytest --every-batch tests/ops/test_batch_invariance.py` runs every number of rows
from 1 to 256 in place of a few.
"""

import platform
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bitwise import assert_same_bits
from op_examples import EXAMPLES, EXPERTS, MOST, Example, normal, of_experts, plain

from deepinfer_jax.ops import rowwise
from deepinfer_jax.ops.device import KINDS, Device
from deepinfer_jax.ops.experts import row_tiles
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.rowwise import in_tiles
from deepinfer_jax.ops.table import OPS

# Below, at and above the tiles of 16 and 32 rows and the blocks of 8.
BATCHES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 255, 256)
FEW = (1, 16, 17, 256)  # for formats after an op's first
CONTROL = (1, 2, 8, 40)
ALL = [k for kernels in OPS.values() for k in kernels]
CLAIMS = [k for k in ALL if k.batch_invariant and "cpu" in k.on]
PLAIN = [k for k in ALL if not k.batch_invariant and "cpu" in k.on]

# Kernels without the claim whose bits have not been seen to follow the batch on x86-64, with the
# examples and numbers of rows of this module. It is no promise: these take one row, or one block
# of an expert's rows, at a time, but nothing keeps XLA from compiling that otherwise elsewhere.
STEADY_BY_CHANCE = {
    "index_scores.tiles",
    "index_scores.rows",
    "index_scores.gathered",
    "experts.sorted_blocks",
}


def name_of(kernel: Kernel) -> str:
    return f"{kernel.op}.{kernel.name}"


def examples_of(kernel: Kernel) -> dict[str, Example]:
    assert kernel.op in EXAMPLES, f"{name_of(kernel)} claims batch invariance without an example"
    return {name: make() for name, make in EXAMPLES[kernel.op].items()}


class Batches:
    """Runs a kernel on any of an example's rows, with padding among them."""

    def __init__(self, kernel: Kernel, example: Example):
        both = jax.tree.map(lambda a, b: np.concatenate([a, b]), example.rows, example.padding)
        self._leaves, form = jax.tree.flatten(both)
        self._run = jax.jit(lambda rows: example.run(kernel, jax.tree.unflatten(form, rows)))

    def __call__(self, at: np.ndarray) -> list[np.ndarray]:
        """The results of rows `at`; a number from MOST on is padding."""
        made = self._run([leaf[at] for leaf in self._leaves])
        return [np.asarray(leaf) for leaf in jax.tree.leaves(made)]


def batches(number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Batches of `number` rows, each with what is special about it."""
    rng = np.random.default_rng(number)
    order = rng.permutation(MOST)[:number]
    yield "first rows", np.arange(number)
    yield "permuted rows", order
    yield "one row, again and again", np.full(number, order[0])
    some = 1 + number // 2
    yield "padding behind", np.where(np.arange(number) < some, order, order + MOST)
    yield "padding in front", np.where(np.arange(number) < number - some, order + MOST, order)
    yield "padding between", np.where(rng.random(number) < 0.5, order, order + MOST)


def chunks(sizes: tuple[int, ...]) -> Iterator[np.ndarray]:
    """All rows in order, cut into chunks of these sizes only; 1 is one of them."""
    rng, at = np.random.default_rng(3), 0
    while at < MOST:
        size = rng.choice([s for s in sizes if s <= min(MOST - at, 64)])
        yield np.arange(at, at + size)
        at += size


def differences(kernel: Kernel, example: Example, sizes: tuple[int, ...]) -> list[str]:
    """Batches in which some row's bits are not those that it has among all rows."""
    run = Batches(kernel, example)
    expected, found = run(np.arange(MOST)), []

    def check(what: str, at: np.ndarray) -> None:
        real = at < MOST
        for made, whole in zip(run(at), expected, strict=True):
            try:
                assert_same_bits(made[real], whole[at[real]])
            except AssertionError as error:
                found.append(f"{len(at)} rows, {what}: {error}")

    for number in sizes:
        for what, at in batches(number):
            check(what, at)
    for at in chunks(sizes):
        check(f"chunk from {at[0]}", at)
    return found


CASES = [
    pytest.param(kernel, name, id=f"{name_of(kernel)}-{name}")
    for kernel in CLAIMS
    for name in EXAMPLES.get(kernel.op, ["absent"])
]


@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_a_row_has_the_same_bits_in_every_batch(kernel, name, request):
    example = examples_of(kernel)[name]
    sizes = BATCHES if name == next(iter(EXAMPLES[kernel.op])) else FEW
    if request.config.getoption("--every-batch"):
        sizes = tuple(range(1, MOST + 1))
    assert differences(kernel, example, sizes) == []


@pytest.mark.parametrize(("kernel", "name"), CASES)
def test_a_row_does_not_see_what_else_its_pool_holds(kernel, name):
    example = examples_of(kernel)[name]
    if example.elsewhere is None:
        assert kernel.op in ("rowwise", "mhc", "linear", "topk", "experts"), "it reads a pool"
        return
    order = np.random.default_rng(1).permutation(MOST)[:17]
    here, there = (Batches(kernel, e) for e in (example, example.elsewhere))
    for a, b in zip(here(order), there(order), strict=True):
        assert_same_bits(a, b)
    assert not np.array_equal(here(order)[0], here(order[::-1])[0])


@pytest.mark.parametrize(
    "kernel", [k for k in PLAIN if name_of(k) not in STEADY_BY_CHANCE], ids=name_of
)
def test_a_kernel_without_the_claim_follows_its_batch_or_is_named_above(kernel):
    if platform.machine() not in ("x86_64", "AMD64") and name_of(kernel) != "linear.xla":
        pytest.skip("how a processor orders its sums is known for x86-64 alone")
    assert differences(kernel, next(iter(examples_of(kernel).values())), CONTROL)


def test_the_names_of_steady_kernels_are_those_of_kernels():
    assert {name_of(k) for k in PLAIN} > STEADY_BY_CHANCE


def test_a_claim_without_an_example_fails():
    new = replace(CLAIMS[0], op="convolution", name="clever")
    with pytest.raises(AssertionError, match=r"convolution.clever claims batch invariance without"):
        examples_of(new)


@pytest.mark.parametrize("op", OPS)
def test_each_op_has_an_invariant_kernel_on_the_cpu_and_arithmetic_claims_it_nowhere_else(op):
    assert any(k.op == op for k in CLAIMS)
    for kind in set(KINDS) - {"cpu"}:
        fits = [
            k for k in OPS[op] if k.refusal(Device.described(kind), batch_invariant=True) is None
        ]
        assert not fits or op == "topk"


def test_a_row_has_the_same_bits_however_full_its_experts_are():
    example = of_experts(plain, np.dtype(np.float32), False)
    kernel = next(k for k in CLAIMS if k.op == "experts")
    run = jax.jit(lambda rows: example.run(kernel, rows))
    x, ids, gates = example.rows
    expected = np.asarray(run((x, ids, gates)))
    for e in range(EXPERTS):  # the first 40 rows stay; all others crowd one expert
        crowded = ids.copy()
        crowded[40:] = (e + np.arange(3)) % EXPERTS
        assert_same_bits(np.asarray(run((x, crowded, gates)))[:40], expected[:40])


def test_the_experts_of_a_row_are_added_in_the_order_of_its_choices():
    example = of_experts(plain, np.dtype(np.float32), False)
    kernel = next(k for k in CLAIMS if k.op == "experts")
    assert kernel.run is row_tiles
    x, ids, gates = example.rows
    run = jax.jit(lambda rows: example.run(kernel, rows))
    parts = [np.asarray(run((x, ids[:, [i]], gates[:, [i]]))) for i in range(3)]
    made = np.asarray(run((x, ids, gates)))
    assert_same_bits(made, (parts[0] + parts[1]) + parts[2])
    assert not np.array_equal(made, (parts[2] + parts[1]) + parts[0])


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
