"""`deepinfer eval`: a suite of held-out prompts, graded by exact match, as a table.

The suite `spec` judges drafters on the same prompts (see `eval_drafts`). What follows `--` is a
command line of lm-evaluation-harness, which then grades instead.
"""

import difflib
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import Model, open_engine
from deepinfer_jax.entrypoints.eval_drafts import COUNT, Asked, drafter_folders, judge_drafters
from deepinfer_jax.entrypoints.harness import run_harness
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.llm import LLM
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.skills.evaluation import SUITE, Entry, Row, evaluate
from deepinfer_jax.skills.sample import HELD_OUT_SEED

_SUITES = {"nano": SUITE, "spec": SUITE}


def command(
    harness: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- LM_EVAL_ARGS", help="Run lm-evaluation-harness with these arguments."
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            "--suite", metavar="NAME", help="nano: accuracy by skill; spec: how good drafters are."
        ),
    ] = "nano",
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Prompts per skill instead of the suite's; of spec 16."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            help="Held-out seed; another one draws other prompts, but the facts skills' are fixed.",
        ),
    ] = HELD_OUT_SEED,
    limit_skill: Annotated[
        list[str] | None,
        typer.Option("--limit-skill", metavar="NAME", help="Only this skill; repeatable."),
    ] = None,
    mask_main_kv: Annotated[
        bool,
        typer.Option("--mask-main-kv", help="Hide the compressed entries: attend in the window."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a required accuracy is missed.")
    ] = False,
    arithmetic: Annotated[
        str | None,
        typer.Option("--arithmetic", metavar="f32|f32qdq|release", help="Rounding of the run."),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="NAME=FOLDER",
            help="In spec, also judge what training.draft --out FOLDER trained; repeatable.",
        ),
    ] = None,
    verification: Annotated[
        str | None,
        typer.Option(
            "--verification",
            metavar="coupled|rejection|block",
            help="In spec, which drafts the engine keeps.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, help="In spec, of the answers; 0 if left out."),
    ] = None,
    truncate: Annotated[
        str | None,
        typer.Option(
            "--truncate", metavar="left", help="In the harness, cut prompts that are too long."
        ),
    ] = None,
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    out: options.OutFile = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Rows on standard output; of spec, all there is.")
    ] = False,
    quiet: options.Quiet = False,
) -> int:
    """Grade greedy answers, or judge drafters by them (--suite spec).

    With --out, what is finished is in the file after every skill.
    """
    if harness:
        skills = {
            "--suite": suite != "nano",
            "--n": n is not None,
            "--seed": seed != HELD_OUT_SEED,
            "--limit-skill": bool(limit_skill),
            "--mask-main-kv": mask_main_kv,
            "--strict": strict,
            "--drafter": bool(drafter),
            "--verification": verification is not None,
            "--temperature": temperature is not None,
            "--out": out is not None,
            "--json": as_json,
            "--quiet": quiet,
        }
        _check_only("the harness", [name for name, given in skills.items() if given])
        return run_harness(
            harness,
            model=model,
            config=config,
            overrides=overrides or None,
            arithmetic=arithmetic,
            truncate=truncate,
        )
    chosen = _chosen(suite, limit_skill or ())
    others = {"--truncate": truncate is not None}
    if suite == "spec":
        others |= {"--mask-main-kv": mask_main_kv, "--strict": strict}
    else:
        others["--drafter"] = bool(drafter)
        others["--verification"] = verification is not None
        others["--temperature"] = temperature is not None
    _check_only(f"the suite {suite}", [name for name, given in others.items() if given])
    for entry in chosen:
        entry.samples(seed, 0)  # refuses a seed that is trained on, before anything is loaded
    if out is not None:
        check_can_write(out)
    if suite == "spec":
        degrees = temperature or 0.0
        folders = drafter_folders(drafter or (), degrees)
        return judge_drafters(
            Asked(chosen, seed, COUNT if n is None else n, folders, degrees),
            out=out,
            as_json=as_json,
            quiet=quiet,
            model=model,
            config=config,
            overrides=overrides,
            arithmetic=arithmetic,
            verification=verification,
        )
    rows: list[Row] = []
    interrupted = False
    with Live(quiet) as live:
        llm = open_engine(
            live,
            model=model,
            config=config,
            overrides=overrides,
            arithmetic=arithmetic,
            kernels={"sparse_mla": "window_only"} if mask_main_kv else None,
        )
        try:
            for place, finished in enumerate(run(llm, chosen, seed, n, live), 1):
                rows += finished
                if out is not None:
                    report = {
                        "suite": suite,
                        "seed": seed,
                        "finished": place == len(chosen),
                        "rows": [_as_json(row) for row in rows],
                        "manifest": llm.manifest(),
                    }
                    write_json(out, report)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        print(json_text([_as_json(row) for row in rows]))
    elif rows:
        _show(rows)
    if interrupted:
        raise KeyboardInterrupt
    return FAILED if strict and not all(row.passed for row in rows) else 0


def run(
    llm: LLM, suite: Sequence[Entry], seed: int, count: int | None, live: Live
) -> Iterator[list[Row]]:
    """The rows of each line of `suite` in turn. Raises what a request failed with."""
    for place, entry in enumerate(suite, 1):
        phase = f"{entry.name}, skill {place} of {len(suite)}:"
        yield _graded(llm, entry, seed, count, phase, live)


def _graded(
    llm: LLM, entry: Entry, seed: int, count: int | None, phase: str, live: Live
) -> list[Row]:
    """One line's rows, its prompts in one call."""
    start, before = time.monotonic(), llm.meter.output_tokens

    def tell(done: int, total: int) -> None:
        spent = time.monotonic() - start
        speed = (llm.meter.output_tokens - before) / spent if spent else 0.0
        detail = f"{done} of {total} prompts, {speed:.0f} tokens/s"
        live.doing(phase, detail, done=done, total=total)

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        tell(0, len(prompts))
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.generate(None, params, [list(ids) for ids in prompts], tell)
        for output in outputs:
            # A prompt that could not run is no wrong answer of the model.
            if output.error is not None:
                raise output.error
        return [output.outputs[0].token_ids for output in outputs]

    return evaluate(generate, llm.tokenizer, [entry], seed=seed, count=count)


def _check_only(what: str, given: Sequence[str]) -> None:
    if given:
        raise ConfigError(
            f"deepinfer eval was given {', '.join(given)}, which {what} does not use.",
            "An option that is ignored would leave its default in force.",
            "Leave it out; the harness's own options stand behind --.",
        )


def _chosen(suite: str, names: Sequence[str]) -> tuple[Entry, ...]:
    if suite not in _SUITES:
        raise ConfigError(
            f"There is no suite {suite!r}.",
            f"The suites are {', '.join(_SUITES)}.",
            "Name one of these with --suite.",
        )
    entries = _SUITES[suite]
    legal = [entry.name for entry in entries]
    for name in names:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, 1)
            raise ConfigError(
                f"The suite {suite} has no skill {name!r}.",
                f"Its skills are {', '.join(legal)}.",
                f"Did you mean {near[0]}?" if near else "Name one of these with --limit-skill.",
            )
    return tuple(entry for entry in entries if not names or entry.name in names)


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "skill": row.skill,
        "n": row.n,
        "accuracy": row.accuracy,
        "stderr": row.stderr,
        "required": row.required,
        "pass": None if row.required is None else row.passed,
    }


def _show(rows: Sequence[Row]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("skill", no_wrap=True)
    for column in ("n", "accuracy", "stderr", "required", "pass"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        required, passed = "", ""
        if row.required is not None:
            required, passed = f"{row.required:.2f}", "yes" if row.passed else "no"
        table.add_row(
            row.skill, str(row.n), f"{row.accuracy:.3f}", f"{row.stderr:.3f}", required, passed
        )
    Console(highlight=False, markup=False).print(table)
