"""The program `deepinfer`: which commands exist, how one is loaded, how a refusal ends.

A command is a module of this folder with a function `command`, whose annotated parameters are its
options (shared ones from `options.py`) and whose return value is its exit code, None for 0. To add
one, write the module and enter it in `COMMANDS`; nothing else registers it. Only the module of the
command that was typed is imported, so `deepinfer --help` does not wait for JAX.

Exit codes: 0 done, 1 some requests failed, 2 bad input, 3 cannot run here, 130 interrupted.
Results go to standard output, everything else to standard error. A refusal is printed as its three
sentences; under --json its parts are also one object `{"error": ...}` on standard output.
"""

import functools
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from deepinfer_jax.errors import DeepInferError, MemoryPlanError, NoKernelError

# Command -> (module of this folder, one line for --help), in the order of --help.
COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate", "Continue prompts, or answer them with --chat."),
    "chat": ("chat", "Talk with the model, or answer given messages in sequence."),
    "eval": ("eval", "Grade the model on held-out prompts, skill by skill."),
    "demo": ("demo", "Three prompts on nano, streamed, and what they took."),
    "trace": ("trace", "Write a forward's arrays, compare two traces, or redo sampler rows."),
    "doctor": ("doctor", "Show the device, versions, variables, kernels and determinism level."),
}
FAILED, BAD_INPUT, CANNOT_RUN, INTERRUPTED = 1, 2, 3, 130


def exit_code(error: DeepInferError) -> int:
    """The exit code of a refusal: 3 when this machine is the reason, else 2."""
    return CANNOT_RUN if isinstance(error, NoKernelError | MemoryPlanError) else BAD_INPUT


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line (default: the process's); always ends in SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _build(arguments)(arguments, prog_name="deepinfer")
    except KeyboardInterrupt:
        _interrupted()
        raise SystemExit(INTERRUPTED) from None


def _build(arguments: Sequence[str]) -> typer.Typer:
    # No option before the command takes a value, so the first plain word is the command.
    typed = next((a for a in arguments if not a.startswith("-")), None)
    app = typer.Typer(
        name="deepinfer",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_program)
    for name, (module, line) in COMMANDS.items():
        function = _unloaded
        if name == typed:
            loaded = importlib.import_module(f"deepinfer_jax.entrypoints.{module}")
            function = _ended(loaded.command, as_json="--json" in arguments)
        app.command(name, help=line)(function)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"deepinfer-jax {importlib.metadata.version('deepinfer-jax')}")
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


def _ended(command: Callable[..., int | None], *, as_json: bool) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except DeepInferError as error:
            _refused(error, as_json=as_json)
            code = exit_code(error)
        except KeyboardInterrupt:
            _interrupted()
            code = INTERRUPTED
        raise typer.Exit(code or 0)

    return run


def _refused(error: DeepInferError, *, as_json: bool) -> None:
    kind = type(error).__name__
    print(f"{kind}: {error.what}\n  {error.why}\n  {error.do}", file=sys.stderr)
    if as_json:
        parts = {"kind": kind, "what": error.what, "why": error.why, "do": error.do}
        print(json.dumps({"error": parts}))


def _interrupted() -> None:
    print("Interrupted. What was finished is kept.", file=sys.stderr)
