"""`deepinfer batch`: a file of OpenAI batch requests in, a folder of results out, resumable."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import (
    Compile,
    Model,
    RecordStep,
    Truncate,
    open_engine,
    record_steps,
)
from deepinfer_jax.entrypoints.progress import Live, clock
from deepinfer_jax.entrypoints.watch import Requests, Watch, watching
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.protocol.ask import Answering
from deepinfer_jax.protocol.batch import answer_batch
from deepinfer_jax.protocol.batch_file import BatchFile, read_batch
from deepinfer_jax.protocol.journal import Journal, Resume
from deepinfer_jax.protocol.metrics_file import METRICS

_RESUME = ("auto", "force", "never")


def command(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests, one JSON object a line.")
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the results.")
    ],
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|force|never",
            help="Go on with results that are there: if made with the same, always, or never.",
        ),
    ] = "auto",
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Results in the order of the requests.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Another name that requests may give the model; repeatable.",
        ),
    ] = None,
    truncate: Truncate = None,
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    compile_ahead: Compile = None,
    record_step: RecordStep = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Answer a batch file. Run it again after a stop: it goes on. Exits with 1 after errors."""
    how = _resume(resume)
    names = {*(served_model_name or ()), *_names(model, config, overrides or ())}
    with Live(quiet) as live:
        live.doing("reading", source.name)
        batch = read_batch(source, names)
        bad = sum(line.error is not None for line in batch.lines)
        if bad:
            live.note(f"{bad} of {len(batch.lines)} lines are no requests that can be served")
        llm = open_engine(
            live,
            model=model,
            config=config,
            overrides=overrides,
            compile=compile_ahead,
            truncate=truncate,
        )
        missed = record_steps(llm, record_step)
        journal = Journal(out, batch, llm.manifest(), resume=how, ordered=ordered)
        if journal.resumed:
            left = len(batch.lines) - journal.resumed
            live.note(f"resuming: {journal.resumed} done, {left} to go")
        requests = Requests(len(batch.lines), journal.tally.answered, journal.tally.failed)
        watched = watching(llm, requests, phase="answering", live=live, metrics=out / METRICS)
        with journal, watched as watch:
            try:
                _run(llm, llm.tokenizer, batch, journal, requests, watch)
            finally:
                journal.drafts = watch.drafts
    summary = journal.summary()
    if as_json:
        print(json.dumps(summary))
    else:
        print(_told(summary, out))
    unrecorded = missed()
    if unrecorded is not None:
        print(unrecorded.as_text(), file=sys.stderr)
    return FAILED if journal.tally.failed or unrecorded is not None else 0


def _run(
    llm: Answering,
    tokenizer: Any,
    batch: BatchFile,
    journal: Journal,
    requests: Requests,
    watch: Watch,
) -> None:
    results = answer_batch(
        batch,
        frozenset(journal.done),
        llm.answer,
        tokenizer,
        clock=time.time,
        fingerprint=journal.fingerprint,
    )
    for result, _ in results:
        journal.append(result)
        requests.done, requests.failed = journal.tally.answered, journal.tally.failed
        watch.show()


def _told(summary: Mapping[str, Any], out: Path) -> str:
    """The end of a run in two lines."""
    requests = summary["requests"]
    ended = [f"{reason} {count}" for reason, count in requests["finish_reasons"].items()]
    answered = requests["count"] - requests["errors"]
    counts = [f"{answered} answered", f"{requests['errors']} errors", *ended]
    if requests["truncated"]:
        counts.append(f"{requests['truncated']} with truncated prompts")
    return (
        f"{requests['count']} requests: {', '.join(counts)}, {clock(summary['time']['run_s'])}\n"
        f"{out / requests['file']}  run digest {requests['digest']}"
    )


def _resume(text: str) -> Resume:
    if text not in _RESUME:
        raise ConfigError(
            f"--resume is {text!r}.",
            f"It is one of {', '.join(_RESUME)}.",
            "auto goes on where an equal run stopped; it is what happens without the option.",
        )
    return cast(Resume, text)


def _names(model: str | None, config: str | None, overrides: Sequence[str]) -> set[str]:
    """What requests may call the model: as it was typed or set, and its last part."""
    given = model
    if given is None:
        given = settings.load(config, list(overrides), env=environment.read()).engine.model
    return {given, Path(given).name}
