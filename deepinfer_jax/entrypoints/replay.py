"""`deepinfer replay`: a recorded step, run again and held against its record bit for bit."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import Model, open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.runner.record import StepRecord, first_difference, read_record

# Of a manifest, what does not decide the bits of a step beyond what stands beside it.
_INERT = ("settings", "variables")
_SHOWN = 4  # differences named in a refusal


def command(
    source: Annotated[
        Path, typer.Argument(metavar="STEP.npz", help="A step that --record-step has written.")
    ],
    model: Model = None,
    overrides: options.Overrides = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Run it although model, settings or versions differ."),
    ] = False,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Run one recorded step again. Exits with 1 at the first leaf that differs in a bit."""
    if out is not None:
        check_can_write(out)
    recorded = read_record(source)
    about = recorded.about
    with Live(quiet) as live:
        llm = open_engine(
            live,
            model=model or about["manifest"]["checkpoint"]["model"],
            overrides=[*_as_recorded(about["engine"]), *(overrides or ())],
        )
        differing = differences(about, llm.about_steps())
        if differing and not force:
            raise _refused(source, differing)
        for text in differing:
            live.note(f"forced: {text}")
        live.doing("compiling and computing")
        here = llm.replay(recorded)
    report = _report(source, recorded, here) | {"forced": differing}
    if out is not None:
        write_json(out, report)
    print(json_text(report) if as_json else _told(report))
    return 0 if report["identical"] else FAILED


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What a step's bits depend on and what is not the same here, as texts; [] if all is."""
    was, now = dict(_flat(_deciding(recorded))), dict(_flat(_deciding(here)))
    return [
        f"{name} was {json.dumps(was.get(name))}, is {json.dumps(now.get(name))}"
        for name in dict.fromkeys((*was, *now))
        if was.get(name) != now.get(name)
    ]


def _deciding(about: Mapping[str, Any]) -> dict[str, Any]:
    manifest = {k: v for k, v in about["manifest"].items() if k not in _INERT}
    manifest["checkpoint"] = manifest["checkpoint"]["digest"]
    manifest["kernels"] = {row["op"]: row["kernel"] for row in manifest["kernels"]}
    rest = {name: about[name] for name in ("engine", "options", "source")}
    return manifest | rest


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _as_recorded(engine: Mapping[str, Any]) -> list[str]:
    """The recorded engine's fields as texts of `--set`."""
    fields = {k: "auto" if v is None else v for k, v in engine.items() if k != "kernels"}
    kernels = {f"kernels.{op}": name for op, name in engine["kernels"]}
    return [f"engine.{key}={json.dumps(value)}" for key, value in (fields | kernels).items()]


def _report(source: Path, recorded: StepRecord, here: StepRecord) -> dict[str, Any]:
    assert here.outputs is not None and here.after is not None
    ended = recorded.outputs is not None
    found = first_difference(recorded, here) if ended else None
    return {
        "file": source.name,
        "step": recorded.step,
        "rows": recorded.key.bucket.rows,
        "finished": ended,
        "identical": ended and found is None,
        "outputs": len(here.outputs),
        "state_leaves": len(here.after),
        "difference": None if found is None else dataclasses.asdict(found),
    }


def _told(report: Mapping[str, Any]) -> str:
    step = f"step {report['step']}, {report['rows']} rows"
    if report["forced"]:
        step += f" (forced: {len(report['forced'])} things are not as recorded)"
    found = report["difference"]
    if report["identical"]:
        leaves = f"{report['outputs']} outputs and {report['state_leaves']} leaves of the state"
        return f"identical: {step}, {leaves}, bit for bit"
    if not report["finished"]:
        return f"not compared: {step}; the recorded run did not finish it, and here it ended"
    place = "" if found["index"] is None else f" at {list(found['index'])}"
    return (
        f"first difference: {step}, {found['leaf']}{place}: "
        f"recorded {found['recorded']}, here {found['replayed']}"
    )


def _refused(source: Path, differing: list[str]) -> ConfigError:
    more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return ConfigError(
        f"{source} was recorded with another engine: {'; '.join(differing[:_SHOWN])}{more}.",
        "A step of another network, kernel or version may differ in its bits for that alone.",
        "Replay it where it was recorded, or pass --force to run it all the same.",
    )
