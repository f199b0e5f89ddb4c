import pickle

import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.device import KINDS, Device
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.table import OPS, Row, select

CPU = Device.described("cpu")


def double(x):
    return x + x


def triple(x):
    return x + x + x


TABLE = {
    "twice": (
        Kernel("twice", "chip", double, on=frozenset({"tpu"})),
        Kernel("twice", "loose", double),
        Kernel("twice", "steady", double, batch_invariant=True),
    ),
    "thrice": (Kernel("thrice", "only", triple, batch_invariant=True),),
}
CHIP = {"twice": TABLE["twice"][:1]}


def test_each_op_is_an_attribute_that_runs_its_kernel():
    ops = select(CPU, table=TABLE)
    assert (ops.twice(2), ops.thrice(2)) == (4, 6)
    assert (ops.twice.name, ops.thrice.name) == ("loose", "only")


def test_an_op_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no op 'half'"):
        _ = select(CPU, table=TABLE).half


def test_rows_say_what_was_chosen_and_what_was_passed_over():
    assert select(CPU, batch_invariant=True, table=TABLE).rows() == (
        Row("twice", "steady", True, "chip: runs on tpu only; loose: not batch invariant"),
        Row("thrice", "only", True, "first in order"),
    )


def test_an_override_is_used_and_recorded():
    row = select(CPU, overrides={"twice": "steady"}, table=TABLE).rows()[0]
    assert row == Row("twice", "steady", True, "asked for by name")


def test_an_override_that_cannot_serve_fails():
    with pytest.raises(NoKernelError, match="chip: runs on tpu only"):
        select(CPU, overrides={"twice": "chip"}, table=TABLE)


def test_an_override_of_an_unknown_op_names_the_nearest():
    with pytest.raises(NoKernelError, match=r"unknown ops: twce.*nearest: twice"):
        select(CPU, overrides={"twce": "loose"}, table=TABLE)


def test_a_table_is_a_static_argument_of_a_compiled_function():
    ops = select(CPU, table=TABLE)
    run = jax.jit(lambda chosen, x: chosen.twice(x), static_argnums=0)
    assert run(ops, jnp.float32(3)) == 6
    assert hash(ops) == hash(select(CPU, table=TABLE))
    assert ops != select(CPU, batch_invariant=True, table=TABLE)


def test_a_table_survives_pickling():
    ops = select(CPU, table=TABLE)
    assert pickle.loads(pickle.dumps(ops)) == ops


def test_the_engine_s_table_is_consistent_and_complete_on_cpu():
    for op, kernels in OPS.items():
        assert {kernel.op for kernel in kernels} == {op}
        assert len({kernel.name for kernel in kernels}) == len(kernels)
        assert all(kernel.on <= set(KINDS) for kernel in kernels)
    assert [row.op for row in select(CPU).rows()] == list(OPS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cpu"])
def test_batch_invariance_is_refused_where_nothing_was_proven(kind):
    with pytest.raises(NoKernelError, match=f"No kernel of op rowwise fits {kind} with batch inv"):
        select(Device.described(kind), batch_invariant=True)


PLAIN = [k for kernels in OPS.values() for k in kernels if not k.batch_invariant]


@pytest.mark.parametrize("kernel", PLAIN, ids=lambda k: f"{k.op}.{k.name}")
def test_a_kernel_without_the_claim_is_refused_with_the_table_of_those_that_have_it(kernel):
    with pytest.raises(NoKernelError) as caught:
        select(CPU, batch_invariant=True, overrides={kernel.op: kernel.name})
    error = caught.value
    assert error.what == f"No kernel of op {kernel.op} fits cpu with batch invariance."
    refusal, _, listed = error.why.partition("; batch invariant on cpu are: ")
    assert refusal == f"Refusals: {kernel.name}: not batch invariant"
    assert listed == (
        "rowwise tiles, mhc row_tiles, linear row_tiles, index_scores each_row, "
        "topk xla or full_sort, sparse_mla each_row, experts row_tiles."
    )
    setting = f"engine.kernels.{kernel.op} or DEEPINFER_KERNEL_{kernel.op.upper()}"
    instead = next(k.name for k in OPS[kernel.op] if k.batch_invariant)
    assert error.do == f"Unset {setting}, or set it to {instead}."


def test_the_table_says_where_a_device_has_no_such_kernel():
    with pytest.raises(NoKernelError, match=r"topk xla or full_sort, sparse_mla none, exp"):
        select(Device.described("sm90"), batch_invariant=True)


def test_without_the_promise_and_of_unknown_names_the_table_is_not_listed():
    for asked in ({"batch_invariant": True, "overrides": {"linear": "tiled"}}, {"table": CHIP}):
        with pytest.raises(NoKernelError) as caught:
            select(CPU, **asked)
        assert "batch invariant on" not in caught.value.why
