"""Versions of Python, of this package and of what it computes with."""

import importlib.metadata
import platform

_PACKAGES = ("deepinfer-jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers")


def version_of(package: str) -> str | None:
    """The version of an installed package.

    None when it is not installed, as this one is not when its source tree is on PYTHONPATH.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """By name, Python first."""
    python: dict[str, str | None] = {"python": platform.python_version()}
    return python | {name: version_of(name) for name in _PACKAGES}
