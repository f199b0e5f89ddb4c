import jax
import jax.numpy as jnp
import pytest

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.kernel import Kernel, choose

CPU, ASCEND = Device.described("cpu"), Device.described("ascend950")


def double(x):
    return x * 2


FAST = Kernel("twice", "fast", double, on=frozenset({"sm100"}))
PLAIN = Kernel("twice", "plain", double)
STEADY = Kernel("twice", "steady", double, on=frozenset({"cpu", "sm90"}), batch_invariant=True)
KERNELS = (FAST, PLAIN, STEADY)


def test_the_first_kernel_that_fits_is_chosen():
    assert choose(KERNELS, CPU, batch_invariant=False) is PLAIN
    assert choose(KERNELS, Device.described("sm100"), batch_invariant=False) is FAST


def test_a_promise_passes_over_kernels_that_do_not_keep_it():
    assert choose(KERNELS, CPU, batch_invariant=True) is STEADY


def test_a_refusal_names_every_kernel_with_its_reason():
    with pytest.raises(NoKernelError) as caught:
        choose(KERNELS, ASCEND, batch_invariant=True)
    error = caught.value
    assert error.what == "No kernel of op twice fits ascend950 with batch invariance."
    assert "fast: runs on sm100 only" in error.why
    assert "plain: not batch invariant" in error.why
    assert "steady: runs on cpu, sm90 only" in error.why
    assert error.do.startswith("Set engine.batch_invariant=false or DEEPINFER_BATCH_INVARIANT=0, ")


def test_without_any_kernel_for_the_device_the_advice_is_another_device():
    with pytest.raises(NoKernelError, match="without further promises") as caught:
        choose((FAST,), CPU, batch_invariant=False)
    assert caught.value.do == "Run on a device that one of these kernels names."


def test_a_kernel_asked_for_by_name_is_used():
    assert choose(KERNELS, CPU, batch_invariant=False, wanted="steady") is STEADY


def test_a_kernel_asked_for_by_name_is_never_replaced_by_another():
    with pytest.raises(NoKernelError, match="fast: runs on sm100 only") as caught:
        choose(KERNELS, CPU, batch_invariant=False, wanted="fast")
    assert "plain:" not in caught.value.why
    assert caught.value.do == (
        "Unset engine.kernels.twice or DEEPINFER_KERNEL_TWICE, or set it to plain."
    )


def test_an_unknown_kernel_name_is_refused_with_the_nearest():
    with pytest.raises(NoKernelError, match=r"no kernel named 'stedy'.*nearest: steady") as caught:
        choose(KERNELS, CPU, batch_invariant=False, wanted="stedy")
    assert caught.value.do.startswith("Set engine.kernels.twice or DEEPINFER_KERNEL_TWICE to one")


def test_a_kernel_is_a_static_argument_and_leaves_its_name_in_the_program():
    run = jax.jit(lambda kernel, x: kernel(x), static_argnums=0)
    text = run.lower(PLAIN, jnp.ones(3)).as_text(debug_info=True)
    assert "twice.plain" in text
    assert hash(PLAIN) == hash(Kernel("twice", "plain", double))
