"""The options of commands that answer prompts, and the engine that such options describe."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer

from deepinfer_jax import env as environment
from deepinfer_jax import settings
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.llm import LLM

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME|DIR|REPO", help="nano, a folder, or a repository."),
]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this sum.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many likeliest tokens; -1: all.")]
SeqSeed = Annotated[
    int | None, typer.Option("--seq-seed", help="Seed of the draws; a fresh one without it.")
]
Truncate = Annotated[
    str | None,
    typer.Option(
        "--truncate",
        metavar="error|left|right",
        help="A prompt too long for its max_tokens: an error, or cut at that end.",
    ),
]
Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="Reason before the answer.")
]
Effort = Annotated[
    str | None,
    typer.Option(
        "--effort",
        metavar="LEVEL",
        help="none, minimal, low, medium, high, xhigh, max, ultra, or 1..100.",
    ),
]

Compile = Annotated[
    str | None,
    typer.Option(
        "--compile",
        metavar="none|lazy|all",
        help="Programs compiled ahead: none, what a request needs (default), or all of them.",
    ),
]
RecordStep = Annotated[
    tuple[str, Path] | None,
    typer.Option(
        "--record-step",
        metavar="N[,M...] DIR",
        help="Write these steps, counted from 1, into DIR for deepinfer replay.",
    ),
]


def open_engine(
    live: Live,
    *,
    model: str | None = None,
    config: str | None = None,
    overrides: Sequence[str] | None = None,
    **explicit: Any,
) -> LLM:
    """Load the model, with compiled programs kept in the user's cache unless a setting says where.

    Args:
        live: told what is being done.
        model, config, overrides: the options `--model`, `--config` and `--set`.
        explicit: engine fields; None is left out.

    Raises:
        DeepInferError: whatever cannot be used.
    """
    texts = list(overrides or ())
    if model is not None:
        # As an override it also beats the environment, which a default would give way to.
        texts.append(f"engine.model={json.dumps(model)}")
    fields: Mapping[str, Any] = {k: v for k, v in explicit.items() if v is not None}
    asked = settings.load(config, texts, env=environment.read(), explicit=fields)
    kept = asked.engine.compile_cache_dir or jax.config.jax_compilation_cache_dir
    if kept is None:
        folder = _user_cache(live)
        fields = fields if folder is None else fields | {"compile_cache_dir": str(folder)}
    live.doing("opening the model")
    return LLM(config=config, overrides=texts, progress=live.report, **fields)


def record_steps(llm: LLM, asked: tuple[str, Path] | None) -> Callable[[], ConfigError | None]:
    """Record the steps of `--record-step` in the run that follows.

    Returns what says, after the run, which of them never came; None if all did.

    Raises ConfigError for a text that names no steps, and for a folder that cannot be written or
    holds them already.
    """
    if asked is None:
        return lambda: None
    recorder = llm.record_steps(_steps(asked[0]), asked[1])

    def missed() -> ConfigError | None:
        if not recorder.missing:
            return None
        return ConfigError(
            f"Steps {', '.join(map(str, sorted(recorder.missing)))} were not recorded.",
            f"The run had {recorder.launched} steps.",
            "Name earlier steps with --record-step, or give the run more to do.",
        )

    return missed


def _steps(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ConfigError(
            f"--record-step is {text!r}.",
            "It is the number of a step, from 1, or several with commas between.",
            "Write for example --record-step 3,8 DIR.",
        )
    return [int(n) for n in numbers]


def effort_level(text: str | None) -> str | int | None:
    """The value of --effort as the renderer takes it: digits are a number."""
    return int(text) if text is not None and text.isdecimal() else text


def _user_cache(live: Live) -> Path | None:
    folder = environment.user_cache() / "deepinfer_jax" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        live.note(f"compiled programs are not kept: {error}")
        return None
    return folder
