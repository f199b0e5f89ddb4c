"""The trace reader on traces written by hand, in the form of each kind of device."""

import os
from typing import Any

import pytest
from jax.profiler import ProfileData

from deepinfer_jax.bench.device_trace import Span, executions, newest, operations, overlap
from deepinfer_jax.bench.step_gap import gaps, main
from deepinfer_jax.errors import ConfigError

STEP, OTHER = "jit_flat", "jit_other"
STATS = ("hlo_module", "program_id", "correlation_id", "run_id")


def plane(name: str, lines: dict[str, list[tuple]]) -> str:
    """Text of one plane; an event is (name, start and length in us, its stats)."""
    names = sorted({event[0] for events in lines.values() for event in events})
    text = [f'name: "{name}"']
    for number, stat in enumerate(STATS, 1):
        text.append(f"stat_metadata {{ key: {number} value {{ id: {number} name: '{stat}' }} }}")
    for number, known in enumerate(names, 1):
        text.append(f"event_metadata {{ key: {number} value {{ id: {number} name: '{known}' }} }}")
    for number, (line, events) in enumerate(lines.items(), 1):
        text.append(f"lines {{ id: {number} name: '{line}' timestamp_ns: 1000")
        for event, start, length, stats in events:
            held = " ".join(
                f"stats {{ metadata_id: {STATS.index(key) + 1} "
                + (f"str_value: '{value}'" if key == "hlo_module" else f"int64_value: {value}")
                + " }"
                for key, value in stats.items()
            )
            text.append(
                f"events {{ metadata_id: {names.index(event) + 1} offset_ps: {start * 10**6} "
                f"duration_ps: {length * 10**6} {held} }}"
            )
        text.append("}")
    return "planes { " + "\n".join(text) + " }"


def profile(*planes: str) -> Any:
    return ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(
        "\n".join(planes)))  # fmt: skip


def kernel(name, start, length, launch, module: str | None = STEP):
    known = {} if module is None else {"hlo_module": module, "program_id": 7}
    return name, start, length, known | {"correlation_id": launch}


def gpu(*, nameless=(), extra=()):
    """Three runs at 0, 100 and 210 us: two kernels and a graph of two; copies on their own."""
    compute, copies, launch = [], [], 10
    for begin in (0, 100, 210):
        copies.append(("MemcpyH2D", begin - 5 if begin else 0, 4, {"correlation_id": launch}))
        kinds = [("gemm", 0, 40, 1), ("gemm", 40, 20, 2), ("norm", 62, 8, 3), ("draw", 65, 15, 3)]
        for name, at, length, number in kinds:
            module = None if name in nameless else STEP
            compute.append(kernel(name, begin + at, length, launch + number, module))
        launch += 10
    compute += extra
    return plane(
        "/device:GPU:0", {"Stream #1(Kernel)": compute, "Stream #2(MemcpyH2D)": copies}
    ) + plane("/host:CPU", {"python": [("PjitFunction", 0, 5, {})]})


@pytest.mark.parametrize("nameless", [(), ("norm", "draw"), ("gemm", "norm", "draw")])
def test_the_kernels_of_a_gpu_fall_into_the_runs_of_their_program(nameless):
    ops = operations(profile(gpu(nameless=nameless)))
    runs = executions(ops, 3)
    assert [(r.start - 1000, r.end - 1000) for r in runs] == [
        (0, 80_000),
        (100_000, 180_000),
        (210_000, 290_000),
    ]
    figures = gaps(runs, [op for op in ops if op.copy])
    assert figures == {
        "steps": 3, "step_us": 105, "device_us": 80, "gap_us": 25, "gap_p90_us": 30,
        "copy_us": 4, "share": 50 / 210, "share_of_medians": 25 / 105,
    }  # fmt: skip


def test_the_busiest_program_is_the_step_unless_another_is_named():
    extra = [kernel("cast", at, 3, at + 1, OTHER) for at in (85, 185)]
    ops = operations(profile(gpu(extra=extra)))
    assert [run.end - run.start for run in executions(ops, 3)] == [80_000] * 3
    assert [run.end - run.start for run in executions(ops, 2, "other")] == [3_000] * 2


def test_a_run_with_a_kernel_more_is_found_by_its_first_kernel():
    begins = [kernel("embed", at, 2, at + 1) for at in (1, 101, 201)]
    rest = [kernel("gemm", at, 50, at + 1) for at in (3, 103, 153, 203)]
    ops = operations(profile(plane("/device:GPU:0", {"Stream #1": begins + rest})))
    assert [run.end - run.start for run in executions(ops, 3)] == [52_000, 102_000, 52_000]


def test_runs_that_cannot_be_told_apart_are_refused_with_what_there_is():
    extra = [kernel("gemm", 300, 5, 99)]
    ops = operations(profile(gpu(extra=extra)))
    with pytest.raises(ConfigError) as refusal:
        executions(ops, 3)
    assert str(refusal.value) == (
        "The 3 runs of the step cannot be found in the trace: 13 operations of jit_flat(7) are 0 "
        "runs. It holds these operations: 13 of jit_flat(7), 3 of copies. Name another module with "
        "--module, keep the trace with --trace DIR and look at it, or set "
        "XLA_FLAGS=--xla_gpu_enable_command_buffer= so that kernels are launched one by one."
    )
    with pytest.raises(ConfigError, match="no module's name holds 'prefill'"):
        executions(ops, 3, "prefill")


def test_an_operation_of_a_cpu_names_its_run():
    events = [
        (name, begin + at, length, {"hlo_module": STEP, "program_id": 7, "run_id": run})
        for run, begin in ((41, 0), (42, 50))
        for name, at, length in (("dot", 0, 10), ("add", 15, 5))
    ]
    host = plane("/host:CPU", {"worker 1": events[:3], "worker 2": [*events[3:], ("x", 0, 9, {})]})
    runs = executions(operations(profile(host)), 2)
    assert [(r.start - 1000, r.end - 1000) for r in runs] == [(0, 20_000), (50_000, 70_000)]
    with pytest.raises(ConfigError, match="4 operations of jit_flat.7. are 2 runs"):
        executions(operations(profile(host)), 3)


def test_a_device_may_write_whole_modules():
    modules = [(f"jit_flat({n})", at, 30, {}) for n, at in ((7, 0), (7, 40))]
    tpu = plane("/device:TPU:0", {"XLA Modules": modules, "XLA Ops": [("dot", 0, 9, {})]})
    assert [r.end - r.start for r in executions(operations(profile(tpu)), 2)] == [30_000] * 2


@pytest.mark.parametrize(
    ("planes", "found"),
    [
        (plane("/host:CPU", {"python": [("f", 0, 5, {})]}), "0 devices"),
        (plane("/device:GPU:0", {"Stream #1": [("MemcpyH2D", 0, 5, {})]}), "0 devices"),
        (gpu() + gpu().replace("GPU:0", "GPU:1"), "2 devices"),
    ],
)
def test_a_trace_without_one_device_is_refused(planes, found):
    with pytest.raises(ConfigError, match=f"The trace holds programs of {found}; its planes are"):
        operations(profile(planes))


def test_only_the_part_of_a_gap_in_which_something_runs_counts_and_counts_once():
    others = [Span(0, 12), Span(11, 14), Span(13, 14), Span(18, 40)]
    assert overlap(Span(10, 20), others) == 4 + 2
    assert overlap(Span(14, 18), others) == 0


def test_the_last_trace_is_read_and_a_missing_one_is_refused(tmp_path, caplog):
    with pytest.raises(ConfigError, match=f"There is no trace under {tmp_path}"):
        newest(tmp_path)
    old, new = tmp_path / "a" / "b.xplane.pb", tmp_path / "a.xplane.pb"
    old.parent.mkdir()
    old.write_bytes(b"")
    new.write_bytes(ProfileData.text_proto_to_serialized_xspace(gpu()))
    os.utime(old, (1, 1))
    assert newest(tmp_path) == new
    with caplog.at_level("INFO", logger="deepinfer_jax.bench"):
        main(["--read", str(new), "--steps", "3"])
    assert caplog.messages == [
        f"{new}: 3 steps of 105 us, gap 25.0 us (23.8 %; of all time 23.8 %; nine of ten at "
        "most 30.0 us; a copy runs in 4.0 us of it)"
    ]
