"""`deepinfer doctor`: what this machine and this environment would run, before anything runs."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import exit_code
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import CheckpointError, ConfigError, NoKernelError
from deepinfer_jax.model.arithmetic import arithmetic
from deepinfer_jax.ops import table
from deepinfer_jax.ops.device import Device, devices
from deepinfer_jax.report.determinism import LEVELS, Level, engine_level
from deepinfer_jax.report.versions import versions


def command(
    config: options.Config = None,
    overrides: options.Overrides = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="R0..R4", help="Exit with 3 if it cannot be reached."),
    ] = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Print the report. What cannot run here, or a level out of reach, is refused in it."""
    if level is not None and level not in LEVELS:
        raise ConfigError(
            f"There is no determinism level {level!r}.",
            "The levels are " + "; ".join(f"{name}: {text}" for name, text in LEVELS.items()) + ".",
            "Ask for one of them.",
        )
    if out is not None:
        check_can_write(out)
    with Live(quiet) as live:
        live.doing("starting the devices")
        report, refusal = examine(config, overrides or (), level)
    report["refusal"] = None if refusal is None else refusal.as_json()
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report, indent=1))
    else:
        _show(report)
    if refusal is None:
        return 0
    print(refusal.as_text(), file=sys.stderr)
    return exit_code(refusal)


def examine(
    config: str | None, overrides: Sequence[str], level: str | None = None
) -> tuple[dict[str, Any], NoKernelError | None]:
    """The report as plain JSON values, and why a run, or `level`, is impossible here.

    Parts that a refusal leaves unknown are None, or empty. Raises EnvError or ConfigError when the
    configuration cannot be read.
    """
    env = environment.read()
    asked = settings.load(config, overrides, env=env)
    report: dict[str, Any] = {
        "device": None,
        "versions": {name: version or "not installed" for name, version in versions().items()},
        "model": _model(asked),
        "arithmetic": asked.engine.arithmetic,
        "cache_format": asked.engine.cache_format,
        "settings": [{"key": k, "value": v, "source": s} for k, v, s in asked.sources],
        "variables": [{"name": n, "value": v, "source": s} for n, v, s in env.rows()],
        "kernels": [],
        "level": None,
    }
    try:
        reached = _examine_device(report, asked.engine, env.xla_flags)
    except NoKernelError as refusal:
        return report, refusal
    if level is None or level <= reached.reachable:
        return report, None
    return report, NoKernelError(
        f"Level {level} is asked for, and {reached.reachable} is the highest within reach.",
        f"{reached.name} holds because {reached.why}.",
        f"Ask for {reached.reachable} at most; {reached.missing(level)}.",
    )


def _examine_device(report: dict[str, Any], engine: settings.EngineConfig, xla_flags: str) -> Level:
    """Fill in what depends on the device, as far as it goes; returns the level of a run."""
    found = devices()
    device = Device.of(found[0])
    report["device"] = {"kind": device.kind, "name": device.name, "count": len(found)}
    name = engine.arithmetic_on(device.kind)
    report["arithmetic"] = name
    report["cache_format"] = arithmetic(name, engine.cache_format).caches.name
    ops = table.select(
        device, batch_invariant=engine.batch_invariant, overrides=dict(engine.kernels)
    )
    report["kernels"] = [
        {"op": r.op, "kernel": r.kernel, "batch_invariant": r.batch_invariant, "why": r.why}
        for r in ops.rows()
    ]
    level = engine_level(ops, engine, xla_flags=xla_flags)
    report["level"] = {
        "name": level.name,
        "promise": level.promise,
        "why": level.why,
        "next": level.next_needs,
        "above": level.steps(),
    }
    return level


def _model(asked: settings.Settings) -> dict[str, Any]:
    """The model's name and folder. A missing one is no reason to report nothing."""
    name = asked.engine.model
    try:
        folder = asked.folder
    except CheckpointError as error:
        if name.count("/") == 1 and name[0] not in "./~":
            note = "a Hugging Face repository, unless a folder is meant; doctor downloads nothing"
            return {"name": name, "folder": None, "note": note}
        return {"name": name, "folder": None, "error": str(error)}
    return {"name": name, "folder": None if folder is None else str(folder)}


def _show(report: dict[str, Any]) -> None:
    out = Table.grid(padding=(0, 2))
    out.add_column(style="bold", no_wrap=True)
    out.add_column()
    device, model, level = report["device"], report["model"], report["level"]
    here = "none" if device is None else f"{device['kind']} x {device['count']} ({device['name']})"
    out.add_row("device", here)
    out.add_row("versions", "  ".join(f"{n} {v}" for n, v in report["versions"].items()))
    place = model.get("error") or model.get("note") or model["folder"] or "config"
    out.add_row("model", f"{model['name']}: {place}")
    out.add_row("arithmetic", report["arithmetic"] or "the device's")
    out.add_row("caches", report["cache_format"] or "the arithmetic's")
    changed = [
        f"{row['key']}={row['value']} ({row['source']})"
        for row in report["settings"]
        if row["source"] != "default"
    ]
    out.add_row("settings", "\n".join(changed) or "all at their defaults")
    given = [row for row in report["variables"] if row["source"] == "environment"]
    lines = [f"{row['name']}={row['value']}" for row in given]
    out.add_row("variables", "\n".join(lines) or "no DEEPINFER_ variable is set")
    if report["kernels"]:
        out.add_row("kernels", _kernels(report["kernels"]))
    if level is not None:
        lines = [f"{level['name']}: {level['promise']}", level["why"], *level["above"].values()]
        out.add_row("level", "\n".join(lines))
    Console(highlight=False, markup=False).print(out)


def _kernels(rows: Sequence[dict[str, Any]]) -> Table:
    table_of = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("op", "kernel", "batch invariant", "why"):
        table_of.add_column(column)
    for row in rows:
        invariant = "yes" if row["batch_invariant"] else "no"
        table_of.add_row(row["op"], row["kernel"], invariant, row["why"])
    return table_of
