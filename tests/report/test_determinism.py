import pytest

from deepinfer_jax.ops.device import Device
from deepinfer_jax.ops.kernel import Kernel
from deepinfer_jax.ops.table import select
from deepinfer_jax.report.determinism import level_of


def same(x):
    return x


LOOSE = {"same": (Kernel("same", "loose", same),)}
STEADY = {"same": (Kernel("same", "loose", same), Kernel("same", "b", same, batch_invariant=True))}
FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def level(kind, flags="", *, table=LOOSE, batch_invariant=False):
    ops = select(Device.described(kind), batch_invariant=batch_invariant, table=table)
    return level_of(ops, xla_flags=flags, table=table)


def test_cpu_keeps_the_bits_of_equal_batches():
    found = level("cpu")
    assert (found.name, found.promise) == ("R1", "same batches and layout, same bits")
    assert found.next_needs.startswith("R2 cannot be reached here: ")
    assert "loose: not batch invariant" in found.next_needs
    assert ". " not in found.next_needs
    assert not found.next_needs.endswith(".")


def test_the_next_level_is_offered_when_its_kernels_exist():
    assert level("cpu", table=STEADY).next_needs == "R2 needs DEEPINFER_BATCH_INVARIANT=1"


def test_batch_invariant_kernels_reach_the_second_level_and_allow_the_third():
    found = level("cpu", table=STEADY, batch_invariant=True)
    assert (found.name, found.reachable) == ("R2", "R3")
    assert "seq_seed" in found.next_needs


@pytest.mark.parametrize(
    ("rule", "instead"),
    [
        ("rejection", "engine.verification=coupled"),
        ("block", "engine.verification=coupled"),
        ("original", "engine.sampler=stable"),
    ],
)
def test_lengths_that_follow_the_other_sequences_leave_equal_tokens_to_coupling(rule, instead):
    ops = select(Device.described("cpu"), batch_invariant=True, table=STEADY)
    given = {"xla_flags": "", "table": STEADY}
    found = level_of(ops, varlen=True, rule=rule, **given)
    assert (found.name, found.reachable) == ("R2", "R2")
    assert found.next_needs == (
        f"R3 needs DEEPINFER_ENABLE_MTP_VARLEN=0 or {instead}, and a seq_seed per request"
    )
    for other in ({"varlen": True, "rule": "coupled"}, {"varlen": False, "rule": rule}):
        assert level_of(ops, **other, **given).reachable == "R3"


@pytest.mark.parametrize("varlen", [False, True])
def test_pages_that_may_run_out_leave_equal_tokens_to_coupling_as_well(varlen):
    ops = select(Device.described("cpu"), batch_invariant=True, table=STEADY)
    given = {"xla_flags": "", "table": STEADY, "few_pages": True, "varlen": varlen}
    assert level_of(ops, rule="coupled", **given).reachable == "R3"
    found = level_of(ops, rule="rejection", **given)
    both = "DEEPINFER_ENABLE_MTP_VARLEN=0 and " if varlen else ""
    assert (found.name, found.reachable, found.next_needs) == (
        "R2",
        "R2",
        f"R3 needs {both}engine.pages left out or engine.verification=coupled, and a seq_seed per "
        "request",
    )


@pytest.mark.parametrize(
    ("flags", "name", "needed"),
    [
        ("", "R0", "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"),
        ("--xla_gpu_deterministic_ops=true", "R0", "XLA_FLAGS with --xla_gpu_autotune_level=0"),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_autotune_level=0", "R0", "deterministic_ops"),
        (FLAGS, "R1", "R2"),
    ],
)
def test_a_gpu_needs_both_flags_for_equal_bits(flags, name, needed):
    found = level("sm90", flags)
    assert (found.name, found.reachable) == (name, name)
    assert needed in found.next_needs


@pytest.mark.parametrize("kind", ["tpu", "ascend950"])
def test_nothing_is_promised_where_nothing_was_measured(kind):
    assert level(kind).name == "R0"


def test_a_gpu_without_the_flags_stays_below_even_with_invariant_kernels():
    assert level("sm90", table=STEADY, batch_invariant=True).name == "R0"


def test_every_level_above_is_told_with_what_it_takes():
    ops = select(Device.described("cpu"), table=STEADY)
    found = level_of(ops, xla_flags="", varlen=True, rule="block", table=STEADY)
    assert found.steps() == {
        "R2": "R2 needs DEEPINFER_BATCH_INVARIANT=1",
        "R3": "R3 needs DEEPINFER_ENABLE_MTP_VARLEN=0 or engine.verification=coupled, and a "
        "seq_seed per request",
        "R4": "R4 needs a network that is split over devices, and every program here runs whole on "
        "one of them, however many there are",
    }
    assert found.missing("R1") == ""
    assert found.missing("R3") == f"{found.steps()['R2']}; {found.steps()['R3']}"
    assert found.missing("R4") == "; ".join(found.steps().values())


@pytest.mark.parametrize(
    ("found", "second"),
    [
        (level("sm90", table=STEADY), "R2 needs DEEPINFER_BATCH_INVARIANT=1"),
        (level("sm90", table=STEADY, batch_invariant=True), "R2 needs R1"),
        (level("sm90", table=LOOSE), "R2 cannot be reached here: No kernel of op same fits sm90"),
        (level("tpu"), "R2 needs R1"),
    ],
)
def test_a_level_is_told_beyond_one_that_is_missing(found, second):
    steps = found.steps()
    assert list(steps) == ["R1", "R2", "R3", "R4"]
    assert steps["R2"].startswith(second)
    seeds = "R3 needs a seq_seed per request"
    known = found.then is not None and "cannot" not in second
    assert steps["R3"] == (seeds if known else "R3 needs R2")
