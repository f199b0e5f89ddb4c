"""`deepinfer bench`: offline throughput of the engine, each repeat with its figures.

Repeats are compared with each other, never with a warm-up: programs are compiled before, and a
repeat inside which one was compiled after all is shown as invalid and counts in no median.
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax.checkpoint.inventory import inventory
from deepinfer_jax.entrypoints import options, varlen
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import Model, open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import ConfigError

LOOPS = ("static", "plain")
SPREADS = ("even", "log")
_COLUMNS = (
    "loop",
    "seqs",
    "repeat",
    "output/s",
    "prompt/s",
    "steps",
    "waits",
    "us/step",
    "seconds",
)
_Drawn = tuple[tuple[int, int], tuple[int, int], str]
_GROUP = 16  # requests of a static batch at most
_PER_SLOT = 4  # requests for each sequence that runs, at least


def command(
    context: typer.Context,
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", "--num-prompts", min=1, help="How many; without it 10 s of them."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            *("--prompt-tokens", "--input-len", "--random-input-len"),
            metavar="LO:HI",
            help="Lengths of prompts, drawn evenly; one number for all alike.",
        ),
    ] = "16:400",
    output_tokens: Annotated[
        str,
        typer.Option(
            *("--output-tokens", "--output-len", "--random-output-len"),
            metavar="LO:HI",
            help="Lengths of outputs.",
        ),
    ] = "8:120",
    sequences: Annotated[
        str | None,
        typer.Option(
            *("--sequences", "--batch-sizes"),
            metavar="N,N,...",
            help="Sequences at a time, measured in turn; else engine.max_num_seqs.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="After the warm-up.")] = 3,
    spread: Annotated[
        str,
        typer.Option(
            "--spread", metavar="even|log", help="How lengths are drawn: evenly, or few long ones."
        ),
    ] = "even",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of lengths and token ids.")] = 0,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="static|plain",
            help="Also run static batches, or without overlap; repeatable.",
        ),
    ] = None,
    simulate_varlen: Annotated[
        bool,
        typer.Option(
            "--simulate-varlen",
            help="Measure nothing: simulate variable verification lengths against fixed ones.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg|png", help="Figure of the simulation."),
    ] = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Print throughput by number of sequences. Exits with 1 if a figure has no valid repeat."""
    varlen.check_words(context, simulate_varlen)
    if simulate_varlen:
        return varlen.simulated(seed=seed, plot=plot, out=out, as_json=as_json, quiet=quiet)
    ranges = _range("--prompt-tokens", prompt_tokens), _range("--output-tokens", output_tokens)
    lengths = *ranges, _spread(spread)
    sizes = [None] if sequences is None else _sizes(sequences)
    others = _loops(compare or ())
    if out is not None:
        check_can_write(out)
    runs: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    with Live(quiet) as live:
        for size in sizes:
            base: float | None = None
            for loop in ("engine", *others):
                llm = _opened(live, loop, size, runs, model, config, overrides)
                run = _measured(live, llm, loop, lengths, requests, repeats, seed)
                facts = facts or _facts(llm, lengths)
                base = _rate(run) if loop == "engine" else base
                if loop != "engine" and base and _rate(run):
                    run["engine_ratio"] = base / _rate(run)
                runs.append(run)
                del llm
    report = facts | {"seed": seed, "runs": runs}
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report))
    else:
        _show(report)
    invalid = sum(len(run["repeats"]) - run["valid"] for run in runs)
    if invalid:
        print(
            f"{invalid} of {sum(len(r['repeats']) for r in runs)} repeats are invalid: something "
            "was compiled inside their window.",
            file=sys.stderr,
        )
    return 0 if all(run["valid"] for run in runs) else FAILED


def _opened(
    live: Live,
    loop: str,
    size: int | None,
    runs: Sequence[Mapping[str, Any]],
    model: str | None,
    config: str | None,
    overrides: Sequence[str] | None,
) -> Any:
    """An engine of one loop; static batches have a slot for each of their requests."""
    fields: dict[str, Any] = {"max_num_seqs": size}
    if loop != "engine":
        fields["overlap"] = False
    if loop == "static":
        last = runs[-1]["sequences"] if size is None else size
        fields["max_num_seqs"] = min(last, _GROUP)
    return open_engine(live, model=model, config=config, overrides=overrides, **fields)


def _measured(
    live: Live,
    llm: Any,
    loop: str,
    lengths: _Drawn,
    requests: int | None,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    """One line of the table."""
    from deepinfer_jax.bench.throughput import WINDOW_S, Lengths, measure

    slots = llm.plan().slots

    def tell(what: str, done: int, total: int) -> None:
        live.doing(f"{loop}, {slots} sequences, {what}", f"{done} of {total} requests",
                   done=done, total=total)  # fmt: skip

    run = measure(
        llm,
        Lengths(*lengths),
        requests=requests,
        least=_PER_SLOT * slots,
        repeats=repeats,
        seed=seed,
        group=slots if loop == "static" else None,
        tell=tell,
    )
    shortest = min(repeat["wall_s"] for repeat in run["repeats"])
    note = None
    if shortest < WINDOW_S:
        why = f"--requests asks for {requests}" if requests else "it ran faster than its warm-up"
        note = f"window of {shortest:.1f} s, shorter than {WINDOW_S:g} s: {why}"
    return {"loop": loop, "sequences": slots, "note": note} | run | {"manifest": llm.manifest()}


def _facts(llm: Any, lengths: _Drawn) -> dict[str, Any]:
    """What all lines have in common, and a figure means nothing without."""
    prompt, output, spread = lengths
    device = llm.manifest()["device"]
    return {
        "model": llm.manifest()["checkpoint"]["model"],
        "parameters": sum(t.parameters for t in inventory(llm.config, drafter=False).values()),
        "device": device,
        "machine": platform.machine(),
        "context": {
            "prompt_tokens": list(prompt),
            "output_tokens": list(output),
            "spread": spread,
            "longest": prompt[1] + output[1],
            "max_model_len": llm.max_model_len,
        },
        "nextn": llm.nextn,
        "acceptance": _acceptance(llm),
    }


def _acceptance(llm: Any) -> str:
    if not llm.nextn:
        return "nothing is drafted"
    return f"{llm.meter.accepted} of {llm.meter.drafted} drafts kept"


def _rate(run: Mapping[str, Any]) -> float:
    return run["median"]["output_tokens_s"] if run["median"] else 0.0


def _show(report: Mapping[str, Any]) -> None:
    context, device = report["context"], report["device"]
    screen = Console(highlight=False, markup=False)
    screen.print(
        f"{report['model']}, {report['parameters']:,} parameters, on {device['kind']} "
        f"({device['name']}, {report['machine']}); prompts of {_span(context['prompt_tokens'])} "
        f"tokens, outputs of {_span(context['output_tokens'])}, spread {context['spread']}, "
        f"nextn {report['nextn']} ({report['acceptance']}). Tokens a second, share of time that "
        "the host waits for the device, host microseconds a step:"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in _COLUMNS:
        left = name in ("loop", "repeat")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for run in report["runs"]:
        lead = [run["loop"], str(run["sequences"])]
        for number, row in enumerate(run["repeats"], 1):
            flag = "" if row["valid"] else " INVALID"
            table.add_row(*lead, f"{number}{flag}", *_cells(row))
            lead = ["", ""]
        if run["median"]:
            table.add_row("", "", "median", *_cells(run["median"]))
    screen.print(table)
    for run in report["runs"]:
        screen.print(f"{run['loop']}, {run['sequences']} sequences: {'; '.join(_remarks(run))}")


def _remarks(run: Mapping[str, Any]) -> list[str]:
    """What the table does not say of one line."""
    warm = run["warm_up"]
    said = [
        f"{run['requests']} requests a repeat",
        f"warm-up of {warm['passes']} passes with {warm['compile_s']:.1f} s of compiling",
    ]
    if run["spread"]:
        low, high = run["spread"]["output_tokens_s"]
        said.append(f"output {low:.1f} to {high:.1f} tok/s")
    else:
        said.append("no valid repeat")
    for number, row in enumerate(run["repeats"], 1):
        if not row["valid"]:
            said.append(f"repeat {number} INVALID: it compiled for {row['compile_s']:.1f} s")
    if "engine_ratio" in run:
        said.append(f"the engine is {run['engine_ratio']:.2f} x as fast")
    return said + ([run["note"]] if run["note"] else [])


def _cells(row: Mapping[str, float]) -> list[str]:
    return [
        f"{row['output_tokens_s']:.1f}",
        f"{row['prompt_tokens_s']:.1f}",
        f"{row['steps']:.0f}",
        f"{100 * row['wait_share']:.0f} %",
        f"{row['host_us_step']:.0f}",
        f"{row['wall_s']:.1f}",
    ]


def _span(ends: Sequence[int]) -> str:
    return f"{ends[0]} to {ends[1]}"


def _range(option: str, text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    ends = [low, high if colon else low]
    if all(end.isdecimal() for end in ends) and 1 <= int(ends[0]) <= int(ends[1]):
        return int(ends[0]), int(ends[1])
    raise ConfigError(
        f"{option} is {text!r}.",
        "It is a number of tokens, or the least and the most of them, at least 1.",
        f"Write for example {option} 16:400.",
    )


def _spread(text: str) -> str:
    if text not in SPREADS:
        raise ConfigError(
            f"--spread is {text!r}.",
            f"Lengths are drawn in one of these ways: {', '.join(SPREADS)}.",
            "Leave it out, or name one of them.",
        )
    return text


def _sizes(text: str) -> list[int]:
    sizes = text.split(",")
    if all(size.isdecimal() and int(size) > 0 for size in sizes):
        return [int(size) for size in sizes]
    raise ConfigError(
        f"--sequences is {text!r}.",
        "It is how many sequences run at a time, at least 1, or several such numbers.",
        "Write for example --sequences 1,16,64.",
    )


def _loops(names: Sequence[str]) -> list[str]:
    wrong = [name for name in names if name not in LOOPS]
    if wrong:
        raise ConfigError(
            f"--compare is {wrong[0]!r}.",
            f"The engine can be compared with {' and '.join(LOOPS)}.",
            "Name one of them.",
        )
    return list(dict.fromkeys(names))
