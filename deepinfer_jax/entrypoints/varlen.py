"""`deepinfer bench --simulate-varlen`: what variable verification lengths would gain, simulated.

It opens no engine and times nothing, so the options that describe a measurement are refused.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json, writing
from deepinfer_jax.errors import ConfigError

_TAKEN = {"simulate_varlen", "seed", "plot", "out", "as_json", "quiet"}


def check_words(context: typer.Context, asked: bool) -> None:
    """Refuse options that would have no effect, with `--simulate-varlen` or without.

    Raises ConfigError that names the first of them.
    """
    typed = [
        param
        for param in context.command.params
        if (source := context.get_parameter_source(param.name or "")) is not None
        and source.name == "COMMANDLINE"
    ]
    if not asked:
        if any(param.name == "plot" for param in typed):
            raise ConfigError(
                "--plot was given without --simulate-varlen.",
                "Only the simulation has a figure.",
                "Add --simulate-varlen, or leave --plot out.",
            )
        return
    other = next((param for param in typed if param.name not in _TAKEN), None)
    if other is not None:
        raise ConfigError(
            f"{other.opts[0]} was given with --simulate-varlen.",
            "The simulation opens no engine and measures nothing, so it would be ignored.",
            "Leave it out; --seed, --plot, --out, --json and --quiet can be given.",
        )


def simulated(*, seed: int, plot: Path | None, out: Path | None, as_json: bool, quiet: bool) -> int:
    """Run the simulation and show it; the exit code."""
    from deepinfer_jax.bench.simulate_varlen import simulate
    from deepinfer_jax.bench.varlen_figure import check_can_draw, draw

    kind = "" if plot is None else check_can_draw(plot)
    for path in filter(None, (plot, out)):
        check_can_write(path)
    with Live(quiet) as live:
        report = simulate(
            seed=seed,
            tell=lambda what, done, total: live.doing(
                f"simulating, {what}", done=done, total=total
            ),
        )
    if plot is not None:
        with writing(plot) as temporary:
            draw(report, temporary, kind)
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report))
    else:
        _show(report)
    return 0


def _show(report: Mapping[str, Any]) -> None:
    settings, published = report["settings"], report["published"]
    screen = Console(highlight=False, markup=False)
    screen.print(
        "Simulated, not measured: variable verification lengths against verifying every one of "
        f"{settings['drafts']} drafts. The engine's scheduler ran on made-up confidences, with "
        f"totals from survivals {settings['lag']} steps old, and on a made-up linear time of a "
        "step. Tokens emitted a step with fixed and variable lengths, and drafts verified, of a "
        "sequence:"
    )
    runs = report["runs"]
    rows = [
        [
            str(run["load"]),
            *(f"{run[name]:.2f}" for name in ("fixed_accept_length", "accept_length", "verified")),
            f"{100 * run['gain']:+.1f} %",
            " to ".join(f"{100 * x:+g}" for x in dict.fromkeys(published["gain"][str(run["load"])]))
            + " %",
            "predicted" if "gain" in run["predicted"] else "fitted",
        ]
        for run in runs
    ]
    heads = ("seqs", "fixed", "variable", "verified", "gain", "published", "gain is")
    screen.print(_table(heads, rows))
    fixed, dynamic = published["fixed"]["accept_length"], published["dynamic"]
    verified = [run["verified"] for run in runs]
    lengths = [run["accept_length"] for run in runs]
    low, high = dynamic["verified"]
    errors = {name: max(run["errors"][name] for run in runs) for name in runs[0]["errors"]}
    screen.print(
        f"Predicted with variable lengths: {min(verified):.2f} to {max(verified):.2f} drafts "
        f"verified, published {low:g} to {high:g}; accept length {min(lengths):.2f} to "
        f"{max(lengths):.2f}, published {dynamic['accept_length']:.2f} as a mean over loads that "
        f"are not named. The fixed one is fitted to the published {fixed:.2f}. Standard errors of "
        f"the chances alone are at most {errors['accept_length']:.2f} in lengths, "
        f"{errors['verified']:.2f} in drafts and {100 * errors['gain']:.1f} % in gains."
    )
    parameters = [
        [p["name"], f"{p['value']:.4g}", p["origin"], p["to"]] for p in report["parameters"]
    ]
    screen.print(_table(("parameter", "value", "is", "to, or what it is"), parameters, left=True))
    screen.print("What one change does; gain in %, drafts verified:")
    loads = [str(run["load"]) for run in runs]
    screen.print(
        _table(
            ("case", "gain " + loads[0], *loads[1:], "drafts " + loads[0], *loads[1:]),
            [
                [
                    case["case"],
                    *(f"{100 * run['gain']:+.1f}" for run in case["runs"]),
                    *(f"{run['verified']:.2f}" for run in case["runs"]),
                ]
                for case in report["sensitivity"]
            ],
        )
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: bool = False) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for place, head in enumerate(heads):
        start = left or not place
        table.add_column(head, justify="left" if start else "right", no_wrap=not left)
    for row in rows:
        table.add_row(*row)
    return table
