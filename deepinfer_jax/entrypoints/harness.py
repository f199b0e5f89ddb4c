"""The part of `deepinfer eval` that runs lm-evaluation-harness with this engine as its model."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_jax.errors import ConfigError

_COMMANDS = ("run", "ls", "validate")


def run_harness(arguments: Sequence[str], **model_args: Any) -> int:
    """Run the harness's command line; returns its exit code.

    `--model deepinfer_jax` is added where no model is named, the first number of `--seed` is the
    base seed of generations, and their digests go into the folder of `--output_path`.

    Args:
        arguments: what was typed after `--`, passed on as it is.
        model_args: of the model; those that were typed win, and None is left out.

    Raises:
        ConfigError: the harness is not installed, or the arguments are not its.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed.",
            "It is an extra of this package, since nothing else needs it.",
            "Install it with: pip install 'deepinfer-jax[eval]'",
        )
    importlib.import_module("deepinfer_jax.evaluation.harness")  # registers the model
    command_line: Any = importlib.import_module("lm_eval.__main__")
    before, sys.argv = sys.argv, ["deepinfer eval --", *completed(arguments, model_args)]
    try:
        command_line.cli_evaluate()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return 0


def completed(arguments: Sequence[str], model_args: dict[str, Any]) -> list[str]:
    """The harness's arguments with the model, and the model's own, put before what was typed."""
    first = arguments[0]
    if not first.startswith("-") and first not in _COMMANDS:
        raise ConfigError(
            f"The harness has no command {first!r}.",
            "What follows -- is the command line of lm-evaluation-harness.",
            f"Begin with an option such as --tasks, or with one of {', '.join(_COMMANDS)}.",
        )
    if first in _COMMANDS[1:]:
        return list(arguments)
    typed = list(arguments[1:] if first == "run" else arguments)
    names = {word.partition("=")[0] for word in typed}
    added = []
    if not names & {"--model", "-M", "--config", "-C"}:
        added = ["--model", "deepinfer_jax"]
    given: dict[str, Any] = {k: v for k, v in model_args.items() if v is not None}
    seed = (_value(typed, "--seed") or "").partition(",")[0].strip()
    if seed.isdecimal():
        given = {"seed": int(seed)} | given
    place = _value(typed, "--output_path", "-o")
    if place is not None and not Path(place).suffix:  # a folder, and not the name of one file
        given["digests"] = str(Path(place) / "digests.jsonl")
    if given:
        added += ["--model_args", json.dumps(given)]
    return ["run", *added, *typed]


def _value(typed: Sequence[str], *names: str) -> str | None:
    """What was typed behind one of these names of an option."""
    for place, word in enumerate(typed):
        name, equals, value = word.partition("=")
        if name in names and (equals or place + 1 < len(typed)):
            return value if equals else typed[place + 1]
    return None
