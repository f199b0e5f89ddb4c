"""`deepinfer plan`: what an engine would hold in memory, by part, and what fits; loads nothing."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.assembly import planner_of
from deepinfer_jax.drafting import drafting_of
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import exit_code
from deepinfer_jax.entrypoints.engine_options import Model
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.ops.device import Device, devices, free_bytes
from deepinfer_jax.report.fit import Planner, Verdict
from deepinfer_jax.report.plan import MemoryPlan, size_text

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt")
    for unit, base in (("ib", 1024), ("b", 1000))
}


def command(
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="BYTES", help="Memory of the device, as in 80GiB, not this one's."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="KIND", help="cpu, sm90, sm100, tpu or ascend950."),
    ] = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Print the plan. What does not fit is refused as `LLM` would, with settings that do fit."""
    available = None if memory is None else bytes_of(memory)
    if out is not None:
        check_can_write(out)
    texts = list(overrides or ())
    if model is not None:
        texts.append(f"engine.model={json.dumps(model)}")
    with Live(quiet) as live:
        live.doing("planning")
        report, verdict = examine(config, texts, available, device)
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report, indent=1))
    else:
        _show(report, verdict)
    if verdict.refusal is None:
        return 0
    print(verdict.refusal.as_text(), file=sys.stderr)
    return exit_code(verdict.refusal)


def bytes_of(text: str) -> int:
    """The value of --memory: a count of bytes, or a number with a unit such as 80GiB or 24 GB.

    Raises ConfigError for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower())
    size = 0
    if found and found[2] in _UNITS:
        size = int(float(found[1]) * _UNITS[found[2]]) if found[2] else int(float(found[1]))
    if size < 1:
        raise ConfigError(
            f"--memory is {text!r}.",
            "It is the memory that a device can give: bytes, or a number and a unit.",
            "Write for example 80GiB, 24GB or 1073741824.",
        )
    return size


def examine(
    config: str | None, overrides: Sequence[str], memory: int | None, kind: str | None
) -> tuple[dict[str, Any], Verdict]:
    """The report as plain JSON values, and what it was made of.

    Args:
        config, overrides: the options `--config` and `--set`.
        memory: bytes that the device can give; None for what the device here has free.
        kind: of the device; None for the one here.

    Raises:
        DeepInferError: settings, model or device that cannot be planned.
    """
    asked = settings.load(config, overrides, env=environment.read())
    here = devices()[0]
    device = Device.of(here) if kind is None else Device.described(kind)
    if memory is None and device.kind == Device.of(here).kind:
        memory = free_bytes(here)
    network = asked.model_config()
    drafts = drafting_of(asked.engine, network, asked.folder, assumed=True).count
    planner = planner_of(
        network,
        asked.engine,
        device,
        free=memory,
        folder=asked.folder,
        drafter=drafts > 0,
        drafts=drafts,
    )
    verdict = planner.judge(asked.engine)
    return _report(asked, planner, verdict), verdict


def _report(asked: settings.Settings, planner: Planner, verdict: Verdict) -> dict[str, Any]:
    network, engine = planner.network, asked.engine
    return {
        "model": engine.model,
        "config": asked.digest(),
        "device": {"kind": network.ops.device.kind, "name": network.ops.device.name},
        "arithmetic": network.arithmetic.name,
        "weights": engine.weights,
        "engram": engine.engram,
        "verification": engine.rule,
        "length": {"asked": engine.max_model_len, "limit": network.config.max_position_embeddings},
        "plan": verdict.plan.as_json(),
        "most": planner.most(engine),
        "alternatives": [
            {
                "set": {f"engine.{name}": v for name, v in way.changes.items()},
                "total": way.plan.total,
            }
            for way in verdict.alternatives
        ],
        "refusal": None if verdict.refusal is None else verdict.refusal.as_json(),
    }


def _show(report: dict[str, Any], verdict: Verdict) -> None:
    plan, device = verdict.plan, report["device"]
    out = Table.grid(padding=(0, 2))
    out.add_column(style="bold", no_wrap=True)
    out.add_column()
    held = f"weights {report['weights']}, Engram tables {report['engram']}"
    out.add_row("model", f"{report['model']}: arithmetic {report['arithmetic']}, {held}")
    out.add_row("device", f"{device['kind']} ({device['name']})")
    out.add_row(
        "sizes",
        f"{plan.slots} sequences of {plan.positions} tokens, {plan.pages} pages of {plan.page} "
        f"tokens, steps of {plan.rows} tokens",
    )
    if plan.drafts:
        rule = report["verification"]
        out.add_row("drafts", f"{plan.drafts} of each sequence a step, verification {rule}")
    length = report["length"]
    if length["asked"] is None and plan.positions < length["limit"]:
        out.add_row("", f"as long as memory holds; the model's limit is {length['limit']} tokens")
    out.add_row("memory", _parts(plan))
    out.add_row("fits", {True: "yes", False: "no", None: "unknown: pass --memory"}[plan.fits])
    if report["most"]:
        most = report["most"]
        out.add_row(
            "at most",
            f"max_model_len {most['max_model_len']}, or max_num_seqs {most['max_num_seqs']}, "
            "the rest as asked",
        )
    if verdict.alternatives:
        lines = [f"{way}  ({size_text(way.plan.total)})" for way in verdict.alternatives]
        out.add_row("instead", "\n".join(lines))
    Console(highlight=False, markup=False).print(out)


def _parts(plan: MemoryPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    whole = plan.total if plan.free is None else max(plan.free, plan.total)
    rows = {**plan.parts, "total": plan.total}
    if plan.free is not None:
        rows |= {"available": plan.free, "left": plan.free - plan.total}
    for name, size in rows.items():
        text = size_text(size) if size >= 0 else f"-{size_text(-size)}"
        table.add_row(name, text, f"{100 * size / whole:.1f} %")
    return table
