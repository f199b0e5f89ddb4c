import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import pytest

from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.device import KINDS, Device, devices, free_bytes


@dataclass
class FakeDevice:
    platform: str
    device_kind: str
    compute_capability: str = ""


def test_the_test_process_runs_on_eight_cpu_devices():
    assert [Device.of(d).kind for d in devices()] == ["cpu"] * 8


def test_a_platform_that_does_not_exist_is_refused_every_time():
    code = """
from deepinfer_jax.errors import NoKernelError
from deepinfer_jax.ops.device import devices
for _ in range(2):
    try:
        devices()
    except NoKernelError as error:
        print(error)
"""
    environ = os.environ | {"JAX_PLATFORMS": "abacus"}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == 2, ran.stderr
    for line in lines:
        assert line.startswith("JAX can use no device of the platform asked for (abacus). It says:")
        assert line.endswith(
            ". Set JAX_PLATFORMS=cpu, or install what JAX needs for that platform."
        )
    assert "'abacus' is not in the list of known backends" in lines[0]


def test_an_assertion_without_a_text_inside_jax_is_a_refusal_too(monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    with pytest.raises(NoKernelError, match="It says: no platform was started."):
        devices()


@pytest.mark.parametrize(
    ("platform", "name", "capability", "kind"),
    [
        ("gpu", "NVIDIA H200", "9.0", "sm90"),
        ("gpu", "NVIDIA B200", "10.0", "sm100"),
        ("gpu", "NVIDIA B300", "10.3", "sm100"),
        ("tpu", "TPU v5 lite", "", "tpu"),
        ("npu", "Ascend950PR", "", "ascend950"),
    ],
)
def test_a_device_is_told_by_its_platform_and_capability(platform, name, capability, kind):
    device = Device.of(FakeDevice(platform, name, capability))
    assert (device.kind, device.name) == (kind, name)


@pytest.mark.parametrize("capability", ["8.9", "11.0", "12.0", "gfx942", ""])
def test_a_gpu_outside_the_half_open_ranges_is_refused_with_its_capability(capability):
    with pytest.raises(NoKernelError) as caught:
        Device.of(FakeDevice("gpu", "Some GPU", capability))
    assert f"compute capability {capability or 'unknown'}" in str(caught.value)
    assert "sm90 is [9.0, 10.0); sm100 is [10.0, 11.0)" in str(caught.value)


def test_an_ascend_chip_of_another_generation_is_refused():
    with pytest.raises(NoKernelError, match=r"npu \(Ascend910B\)"):
        Device.of(FakeDevice("npu", "Ascend910B"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_described_while_absent(kind):
    assert Device.described(kind).kind == kind


def test_describing_an_unknown_kind_names_the_nearest():
    with pytest.raises(NoKernelError, match=r"'sm99'.*nearest: sm90"):
        Device.described("sm99")


class Stats:
    platform = "gpu"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_free_memory_is_read_from_the_device_or_the_system():
    assert free_bytes(Stats({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert free_bytes(Stats(None)) is None
    here = free_bytes(jax.devices()[0])
    assert here is None or 0 < here < 1 << 50
