"""The cost table of verification: measured size by size, kept in a file, read back.

A file tells what it was measured for, and is refused for anything else. Nothing is ever removed
from its folder; a table that is too old is measured again and replaced.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.files import replacing
from deepinfer_jax.sampling.lengths import CostTable

TTL_S = 3600.0  # the original engine's default
TIMED = 5
_FORMAT = 1

TimeStep = Callable[[int], float]
"""Runs one step of so many rows, all of them real, and returns the forward's milliseconds."""
Identity = Mapping[str, Any]
"""What decides a step's time, as plain JSON values: model digest, device kind and count, digest of
the package's source, drafts, sequences."""


def measure(sizes: Iterable[int], time_step: TimeStep) -> CostTable:
    """Time every size, from large to small.

    Each runs once to warm up and five times for the clock; the fastest and the slowest are dropped
    and the mean of the others is taken.
    """
    taken: dict[int, float] = {}
    for size in sorted(set(sizes), reverse=True):
        time_step(size)
        middle = sorted(time_step(size) for _ in range(TIMED))[1:-1]
        taken[size] = sum(middle) / len(middle)
    return CostTable.of(sorted(taken.items()))


def kept_or_measured(
    sizes: Iterable[int],
    time_step: TimeStep,
    *,
    folder: Path | None,
    identity: Identity,
    ttl_s: float = TTL_S,
    now: Callable[[], float] = time.time,
) -> CostTable:
    """The table from `folder` when it is there and younger than `ttl_s` seconds, else a new one.

    Args:
        sizes: rows of the compiled steps.
        time_step: measures one.
        folder: where tables are kept; None keeps none.
        identity: what the table holds for, beside `sizes`.
        ttl_s: how long a table is used, in seconds.
        now: seconds since 1970.

    Raises:
        ConfigError: the file is damaged or is of something else, or the folder cannot be written.
    """
    sizes = sorted(set(sizes))
    if folder is None:
        return measure(sizes, time_step)
    identity = {**identity, "sizes": sizes}
    path = folder / file_name(identity)
    if path.exists():
        table, measured_at = read(path, identity)
        if 0 <= now() - measured_at < ttl_s:
            return table
    table = measure(sizes, time_step)
    write(path, table, identity, now())
    return table


def file_name(identity: Identity) -> str:
    """The name under which a table of `identity` is kept."""
    return f"step-cost-{_digest(identity)[:16]}.json"


def write(path: Path, table: CostTable, identity: Identity, measured_at: float) -> None:
    """Write a table, under another name first. Raises ConfigError when it cannot be written.

    `measured_at` is in seconds since 1970.
    """
    content = {
        "format": _FORMAT,
        "digest": _digest(identity),
        "measured_for": dict(identity),
        "measured_at": measured_at,
        "time_unit": "ms",
        "costs": list(zip(table.sizes.tolist(), table.ms.tolist(), strict=True)),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ConfigError(
            f"The cost table {path} cannot be written ({error.strerror or error}).",
            "A table that is not kept would be measured again at every start.",
            "Name a folder that can be written, or none.",
        ) from None


def read(path: Path, identity: Identity) -> tuple[CostTable, float]:
    """A table and when it was measured, in seconds since 1970.

    Raises ConfigError when the file is missing or damaged, or was measured for something else.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT or content["time_unit"] != "ms":
            raise ValueError("another format")
        if content["digest"] != _digest(content["measured_for"]):
            raise ValueError("its digest does not fit what it says it was measured for")
        table = CostTable.of(content["costs"])
        measured_for, measured_at = dict(content["measured_for"]), float(content["measured_at"])
    except OSError as error:
        raise ConfigError(
            f"The cost table {path} cannot be read ({error.strerror or error}).",
            "Without measured times, verifying every draft would always look best.",
            "Measure one on this device, or give the file of one.",
        ) from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"The cost table {path} is damaged ({type(error).__name__}: {error}).",
            "Lengths that follow wrong times would only be slow, and nobody would notice.",
            "Remove the file; it is measured again at the next start.",
        ) from None
    if content["digest"] != _digest(identity):
        raise _other(path, measured_for, identity)
    return table, measured_at


def _other(path: Path, found: Identity, wanted: Identity) -> ConfigError:
    # JSON has no tuples, so both are compared as they would be read back.
    found, wanted = json.loads(_canonical(found)), json.loads(_canonical(wanted))
    keys = [k for k in sorted({*found, *wanted}) if found.get(k) != wanted.get(k)]
    named = "; ".join(f"{k} {found.get(k)!r}, not {wanted.get(k)!r}" for k in keys)
    return ConfigError(
        f"The cost table {path} was measured for {named}.",
        "Another model, device, program or set of sizes takes other times.",
        "Measure one for this engine, in a file of its own.",
    )


def _canonical(identity: Identity) -> str:
    return json.dumps(dict(identity), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(identity: Identity) -> str:
    return hashlib.sha256(_canonical(identity).encode()).hexdigest()
