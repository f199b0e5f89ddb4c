"""The manifest: everything that decides a run's results, as plain JSON values."""

import dataclasses
import re
from typing import Any

from deepinfer_jax.env import Env
from deepinfer_jax.ops.table import Ops
from deepinfer_jax.report.determinism import level_of
from deepinfer_jax.report.versions import versions
from deepinfer_jax.settings import Settings

# An absolute path up to its last part; the slash of owner/name does not begin one.
_FOLDERS = re.compile(r"(?:~[^/\s]*|(?<![\w.~/]))/(?:[^/\s]+/)*(?=[^/\s])")


def manifest(
    settings: Settings,
    env: Env,
    ops: Ops,
    *,
    arithmetic: str,
    cache_format: str,
    max_model_len: int,
    devices: int,
    checkpoint: str | None,
    revision: str | None,
    tokenizer: str,
) -> dict[str, Any]:
    """What one engine's results depend on.

    Args:
        settings: resolved, with the model's config at hand.
        env: the parsed environment.
        ops: the chosen kernels on their device.
        arithmetic, cache_format, max_model_len, devices: as the engine runs.
        checkpoint, tokenizer: digests.
        revision: the commit of a downloaded checkpoint, None for the user's own files.

    Returns:
        JSON values. Of a path only the last part is kept: where a file lies on one machine says
        nothing about a result, and much about whose machine it is.
    """
    values = {key: value for key, value, _ in settings.sources}
    variables = list(env.rows())
    if env.xla_flags:
        variables.append(("XLA_FLAGS", env.xla_flags, "environment"))
    return {
        "versions": versions(),
        "device": {"kind": ops.device.kind, "name": ops.device.name, "count": devices},
        "level": level_of(ops, xla_flags=env.xla_flags).name,
        "config": settings.digest(),
        "checkpoint": {
            "model": without_folders(values["engine.model"]),
            "revision": revision,
            "digest": checkpoint,
        },
        "tokenizer": tokenizer,
        "arithmetic": arithmetic,
        "cache_format": cache_format,
        "max_model_len": max_model_len,
        "kernels": [dataclasses.asdict(row) for row in ops.rows()],
        "settings": [
            {"key": key, "value": without_folders(value), "source": source}
            for key, value, source in settings.sources
        ],
        "variables": [
            {"name": name, "value": without_folders(text), "source": source}
            for name, text, source in variables
        ],
    }


def without_folders(value: Any) -> Any:
    """`value`; of a text, every absolute path in it is cut down to its last part."""
    return _FOLDERS.sub("", value) if isinstance(value, str) else value
