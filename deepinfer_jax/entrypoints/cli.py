"""The program `deepinfer`: which commands exist, how one is loaded, how a refusal ends.

A command is a module of this folder with a function `command`, whose annotated parameters are its
options (shared ones from `options.py`) and whose return value is its exit code, None for 0. To add
one, write the module and enter it in `COMMANDS`; nothing else registers it. Only the module of the
command that was typed is imported, so `deepinfer --help` does not wait for JAX.

Exit codes: 0 done, 1 some requests failed, 2 bad input, 3 cannot run here, 130 interrupted.
Results go to standard output, everything else to standard error. A refusal is printed as its three
sentences; under --json its parts are also one object `{"error": ...}` on standard output.
"""

import difflib
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from deepinfer_jax.errors import ConfigError, DeepInferError, MemoryPlanError, NoKernelError
from deepinfer_jax.report.versions import version_of

# Command -> (module of this folder, one line for --help), in the order of --help.
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate", "Continue prompts, or answer them with --chat."),
    "chat": ("chat", "Talk with the model, or answer given messages in sequence."),
    "batch": ("batch", "Answer a file of OpenAI batch requests, resumable."),
    "score": ("score", "How likely given continuations are after their contexts."),
    "eval": (
        "eval",
        "Grade the model by skill, judge drafters, or run lm-evaluation-harness after --.",
    ),
    "plan": ("plan", "Show what an engine would hold in memory, and what fits."),
    "bench": ("bench", "Measure offline throughput, warm-up apart."),
    "demo": ("demo", "Three prompts on nano, streamed, and what they took."),
    "trace": ("trace", "Write a forward's arrays, compare two traces, or redo sampler rows."),
    "replay": ("replay", "Run a recorded step again and compare it bit for bit."),
    "doctor": ("doctor", "Show the device, versions, variables, kernels and determinism level."),
}
FAILED, BAD_INPUT, CANNOT_RUN, INTERRUPTED = 1, 2, 3, 130
# Depending on its version, Typer raises the errors of the click that is installed or of its own
# copy; this is their base class in either.
_UsageError: Any = typer.BadParameter.__mro__[1]


def exit_code(error: DeepInferError) -> int:
    """The exit code of a refusal: 3 when this machine is the reason, else 2."""
    return CANNOT_RUN if isinstance(error, NoKernelError | MemoryPlanError) else BAD_INPUT


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line (default: the process's); always ends in SystemExit."""
    # Without any argument, the help is what is missing.
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _run(arguments)
    except DeepInferError as error:
        print(error.as_text(), file=sys.stderr)
        if "--json" in arguments:
            print(json.dumps({"error": error.as_json()}, allow_nan=False))
        code = exit_code(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("Interrupted. What was finished is kept.", file=sys.stderr)
    raise SystemExit(code)


def _run(arguments: list[str]) -> int:
    """The exit code of one command line; INTERRUPTED when Typer met a KeyboardInterrupt."""
    # No option before the command takes a value, so the first plain word is the command.
    typed = next((a for a in arguments if not a.startswith("-")), None)
    if typed is not None and typed not in COMMANDS:
        near = difflib.get_close_matches(typed, COMMANDS, 1)
        raise ConfigError(
            f"There is no command {typed!r}.",
            f"The commands are {', '.join(COMMANDS)}.",
            f"Did you mean {near[0]}?" if near else "Name one of these.",
        )
    try:
        return _build(typed)(arguments, prog_name="deepinfer", standalone_mode=False) or 0
    except _UsageError as error:
        raise _misused(error, typed, arguments) from None


def _build(typed: str | None) -> typer.Typer:
    app = typer.Typer(
        name="deepinfer",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_program)
    for name, (module, line) in COMMANDS.items():
        function = _unloaded
        if name == typed:
            function = importlib.import_module(f"deepinfer_jax.entrypoints.{module}").command
        app.command(name, help=line)(function)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"deepinfer-jax {version_of('deepinfer-jax') or 'not installed'}")
        raise typer.Exit()


def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Exact inference for DeepSeek-V4.1. The default model is the packaged nano."""


def _unloaded() -> None:
    """Stands for the commands that were not typed; only their names and help are used."""
    raise AssertionError("a command that was not typed cannot run")


def _misused(error: Any, typed: str | None, arguments: Sequence[str]) -> ConfigError:
    """What Typer refused about the words of a command line, in three sentences."""
    program = " ".join(filter(None, ("deepinfer", typed)))
    advice = f"See {program} --help."
    if hasattr(error, "possibilities"):
        near = list(error.possibilities or ())
        return ConfigError(
            f"{program} has no option {error.option_name}.",
            "An option that is ignored would leave its default in force.",
            f"Did you mean {near[0]}?" if near else advice,
        )
    param = getattr(error, "param", None)
    value = None if param is None else _value(param.opts, arguments)
    if value is not None:
        return ConfigError(
            f"{program}: {value[0]} is {value[1]!r}.", f"{error.message.rstrip('.')}.", advice
        )
    return ConfigError(
        f"{program}: {error.format_message().rstrip('.')}.",
        "Nothing was run, since what is meant is not clear.",
        advice,
    )


def _value(options: Sequence[str], arguments: Sequence[str]) -> tuple[str, str] | None:
    """The last option among `options` that was typed, with its value."""
    for place in range(len(arguments) - 1, -1, -1):
        option, equals, value = arguments[place].partition("=")
        if option in options and (equals or place + 1 < len(arguments)):
            return option, value if equals else arguments[place + 1]
    return None
