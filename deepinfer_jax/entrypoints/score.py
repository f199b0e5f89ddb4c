"""`deepinfer score`: how likely continuations are after their contexts, from a file of pairs."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deepinfer_jax.entrypoints import options
from deepinfer_jax.entrypoints.cli import FAILED
from deepinfer_jax.entrypoints.engine_options import Model, open_engine
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.results import check_can_write, json_text, write_json
from deepinfer_jax.errors import ConfigError, DeepInferError, RequestError
from deepinfer_jax.request import Score

_KEYS = {"context", "continuation"}


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN.jsonl", help='Lines {"context", "continuation"}; - reads standard input.'
        ),
    ],
    model: Model = None,
    config: options.Config = None,
    overrides: options.Overrides = None,
    out: options.OutFile = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Score continuations, texts or lists of token ids. Exits with 1 if a line has an error."""
    if out is not None:
        check_can_write(out)
    lines = read_pairs(source)
    with Live(quiet) as live:
        llm = open_engine(live, model=model, config=config, overrides=overrides)
        pairs = [line for line in lines if not isinstance(line, DeepInferError)]

        def tell(done: int, total: int) -> None:
            live.doing("scoring", f"{done} of {total} pairs", done=done, total=total)

        tell(0, len(pairs))
        scored = iter(llm.score(pairs, tell))
        rows = [
            {"error": line.as_json()} if isinstance(line, DeepInferError) else _row(next(scored))
            for line in lines
        ]
    report = {"scores": rows, "manifest": llm.manifest()}
    if out is not None:
        write_json(out, report)
    if as_json:
        print(json_text(report))
    else:
        _show(rows)
    return FAILED if any("error" in row for row in rows) else 0


def read_pairs(source: str) -> list[tuple[Any, Any] | DeepInferError]:
    """(context, continuation) of every line that is not blank, or what is wrong with it.

    Raises ConfigError when the file cannot be read or holds nothing.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source} cannot be read ({type(error).__name__}).",
            "It holds the pairs, a JSON object a line.",
            "Name a readable file of UTF-8 text, or - for standard input.",
        ) from None
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(
            f"{source} holds no pair.",
            "There is nothing to score.",
            'Write lines such as {"context": "1 + 1 = ", "continuation": "2"}.',
        )
    return [_pair(number, line) for number, line in lines]


def _pair(number: int, line: str) -> tuple[Any, Any] | DeepInferError:
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict) or set(content) != _KEYS:
        found = f"has the keys {', '.join(content)}" if isinstance(content, dict) else "is none"
        return RequestError(
            f"Line {number} must be a JSON object of a pair; it {found}.",
            "A pair is a context and a continuation, and a key that is ignored would mislead.",
            "Give the keys context and continuation, and no other.",
        )
    return content["context"], content["continuation"]


def _row(score: Score) -> dict[str, Any]:
    if score.error is not None:
        return {"error": score.error.as_json()}
    return {
        "logprob_sum": score.logprob_sum,
        "is_greedy": score.is_greedy,
        "logprobs": score.logprobs.tolist(),
        "context_token_ids": list(score.context_token_ids),
        "token_ids": list(score.token_ids),
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("pair", "tokens", "log-prob", "a token", "greedy"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error")
    for number, row in enumerate(rows, 1):
        if "error" in row:
            table.add_row(f"{number}", "", "", "", "", row["error"]["what"])
            continue
        tokens, total = len(row["token_ids"]), row["logprob_sum"]
        mean = f"{total / tokens:.4f}" if tokens else ""
        greedy = "yes" if row["is_greedy"] else "no"
        table.add_row(f"{number}", f"{tokens}", f"{total:.4f}", mean, greedy, "")
    Console(highlight=False, markup=False).print(table)
