"""Which hardware a kernel meets: five kinds, told from a JAX device or described while absent."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from deepinfer_jax.errors import NoKernelError

KINDS = ("cpu", "sm90", "sm100", "tpu", "ascend950")

# NVIDIA generations as half-open ranges [low, high) of (major, minor) compute capability. A newer
# chip is no superset of an older one: its tensor-core instructions differ, so it is a new kind.
_CAPABILITIES = {
    "sm90": ((9, 0), (10, 0)),
    "sm100": ((10, 0), (11, 0)),
}
_ASCEND_PLATFORMS = frozenset({"ascend", "npu"})


@dataclass(frozen=True)
class Device:
    """One hardware kind, present or only described (for ahead-of-time work and reports).

    Attributes:
        kind: one of `KINDS`.
        name: the driver's name of the chip, or the kind when the chip is not here.
        capability: NVIDIA compute capability (major, minor); None elsewhere.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None

    @classmethod
    def described(cls, kind: str) -> "Device":
        """A device of `kind` that need not exist here. Raises NoKernelError on other kinds."""
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, 1) or list(KINDS)
            raise NoKernelError(
                f"There is no device kind {kind!r}.",
                f"Kernels are written for {', '.join(KINDS)}.",
                f"Name one of these (nearest: {near[0]}).",
            )
        low = _CAPABILITIES.get(kind, (None, None))[0]
        return cls(kind, kind, low)

    @classmethod
    def of(cls, device: Any) -> "Device":
        """The kind of a `jax.Device`, by its platform, name and compute capability.

        Raises NoKernelError when the chip belongs to no kind that has kernels.
        """
        platform, name = device.platform, device.device_kind
        if platform == "cpu":
            return cls("cpu", name)
        if platform == "tpu":
            return cls("tpu", name)
        if platform in _ASCEND_PLATFORMS and "950" in name:
            return cls("ascend950", name)
        if platform == "gpu":
            # The attribute is absent on GPUs that are not NVIDIA's.
            text = str(getattr(device, "compute_capability", ""))
            capability = _parse_capability(text)
            for kind, (low, high) in _CAPABILITIES.items():
                if capability is not None and low <= capability < high:
                    return cls(kind, name, capability)
            name = f"{name}, compute capability {text or 'unknown'}"
        ranges = "; ".join(
            f"{kind} is [{low[0]}.{low[1]}, {high[0]}.{high[1]})"
            for kind, (low, high) in _CAPABILITIES.items()
        )
        raise NoKernelError(
            f"No kernels exist for this device: {platform} ({name}).",
            f"The kinds are {', '.join(KINDS)}, by compute capability {ranges}.",
            "Run on one of these, or set JAX_PLATFORMS=cpu.",
        )


def _parse_capability(text: str) -> tuple[int, int] | None:
    major, dot, minor = text.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def devices() -> list[Any]:
    """The `jax.Device`s of this process, at least one; NoKernelError when JAX can use none."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        # After a first failure JAX fails an assertion that has no text.
        asked = jax.config.jax_platforms
        text = str(error).strip() or "no platform was started"
        reason = text.splitlines()[0].partition(". ")[0].rstrip(".")
        raise NoKernelError(
            f"JAX can use no device of the platform asked for ({asked or 'the best one here'}).",
            f"It says: {reason}.",
            "Set JAX_PLATFORMS=cpu, or install what JAX needs for that platform.",
        ) from None


def free_bytes(device: Any) -> int | None:
    """Memory that a `jax.Device` can still give, in bytes; None when the system does not tell."""
    if device.platform == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
        except OSError:
            return None
        found = next((line for line in lines if line.startswith("MemAvailable:")), None)
        return None if found is None else int(found.split()[1]) * 1024
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
