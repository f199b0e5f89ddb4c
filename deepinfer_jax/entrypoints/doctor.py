"""`deepinfer doctor`: what this machine and this environment would run, before anything runs."""

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.entrypoints import options
from deepinfer_jax.errors import CheckpointError, ConfigError, NoKernelError
from deepinfer_jax.ops import table
from deepinfer_jax.ops.device import Device
from deepinfer_jax.report.determinism import LEVELS, Level, level_of

_PACKAGES = ("deepinfer-jax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers")


def command(
    config: options.Config = None,
    overrides: options.Overrides = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="R0..R3", help="Exit with 3 if it cannot be reached."),
    ] = None,
    as_json: options.Json = False,
) -> int:
    """Print the report; a level that is asked for and out of reach is refused after it."""
    if level is not None and level not in LEVELS:
        raise ConfigError(
            f"There is no determinism level {level!r}.",
            "The levels are " + "; ".join(f"{name}: {text}" for name, text in LEVELS.items()) + ".",
            "Ask for one of them.",
        )
    report, reached = examine(config, overrides or ())
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _show(report)
    if level is not None and level > reached.reachable:
        raise NoKernelError(
            f"Level {level} is asked for, and {reached.reachable} is the highest within reach.",
            f"{reached.name} holds because {reached.why}.",
            f"{reached.next_needs}.",
        )
    return 0


def examine(config: str | None, overrides: Sequence[str]) -> tuple[dict[str, Any], Level]:
    """The report as plain JSON values, and the level that the run would have.

    Raises EnvError, ConfigError or NoKernelError when the configuration could not run here.
    """
    env = environment.read()
    asked = settings.load(config, overrides, env=env)
    engine = asked.engine
    devices = jax.devices()
    device = Device.of(devices[0])
    ops = table.select(
        device, batch_invariant=engine.batch_invariant, overrides=dict(engine.kernels)
    )
    level = level_of(ops, xla_flags=env.xla_flags)
    try:
        model = {"name": engine.model, "folder": str(asked.folder) if asked.folder else None}
    except CheckpointError as error:
        # A missing model is something to report here, not a reason to report nothing.
        model = {"name": engine.model, "error": str(error)}
    report = {
        "device": {"kind": device.kind, "name": device.name, "count": len(devices)},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "model": model,
        "arithmetic": engine.arithmetic_on(device.kind),
        "settings": [{"key": k, "value": v, "source": s} for k, v, s in asked.sources],
        "variables": [{"name": n, "value": v, "source": s} for n, v, s in env.rows()],
        "kernels": [
            {"op": r.op, "kernel": r.kernel, "batch_invariant": r.batch_invariant, "why": r.why}
            for r in ops.rows()
        ],
        "level": {
            "name": level.name,
            "promise": level.promise,
            "why": level.why,
            "next": level.next_needs,
        },
    }
    return report, level


def _show(report: dict[str, Any]) -> None:
    out = Table.grid(padding=(0, 2))
    out.add_column(style="bold", no_wrap=True)
    out.add_column()
    device, model, level = report["device"], report["model"], report["level"]
    out.add_row("device", f"{device['kind']} x {device['count']} ({device['name']})")
    out.add_row("versions", "  ".join(f"{n} {v}" for n, v in report["versions"].items()))
    out.add_row("model", f"{model['name']}: {model.get('error') or model['folder'] or 'config'}")
    out.add_row("arithmetic", report["arithmetic"])
    changed = [
        f"{row['key']}={row['value']} ({row['source']})"
        for row in report["settings"]
        if row["source"] != "default"
    ]
    out.add_row("settings", "\n".join(changed) or "all at their defaults")
    given = [row for row in report["variables"] if row["source"] == "environment"]
    lines = [f"{row['name']}={row['value']}" for row in given]
    out.add_row("variables", "\n".join(lines) or "no DEEPINFER_ variable is set")
    out.add_row("kernels", _kernels(report["kernels"]))
    out.add_row("level", f"{level['name']}: {level['promise']}\n{level['why']}\n{level['next']}")
    Console(highlight=False, markup=False).print(out)


def _kernels(rows: Sequence[dict[str, Any]]) -> Table:
    table_of = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("op", "kernel", "batch invariant", "why"):
        table_of.add_column(column)
    for row in rows:
        invariant = "yes" if row["batch_invariant"] else "no"
        table_of.add_row(row["op"], row["kernel"], invariant, row["why"])
    return table_of
