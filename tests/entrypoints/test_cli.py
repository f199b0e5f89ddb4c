import importlib.metadata
import json
import subprocess
import sys
import types

import pytest

from deepinfer_jax.entrypoints import cli
from deepinfer_jax.errors import (
    CheckpointError,
    ConfigError,
    MemoryPlanError,
    NoKernelError,
    RequestError,
)


@pytest.fixture
def program(monkeypatch):
    """Make `deepinfer fake` run the given function; returns the exit code."""

    def program(function, *arguments: str) -> int:
        module = types.ModuleType("deepinfer_jax.entrypoints.fake")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "fake", ("fake", "A command of this test."))
        with pytest.raises(SystemExit) as caught:
            cli.main(["fake", *arguments])
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return program


def test_a_command_without_a_result_ends_with_zero(program):
    assert program(lambda: None) == 0


def test_a_command_s_result_is_the_exit_code(program):
    assert program(lambda: cli.FAILED) == 1


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, 2),
        (CheckpointError, 2),
        (RequestError, 2),
        (NoKernelError, 3),
        (MemoryPlanError, 3),
    ],
)
def test_a_refusal_is_three_sentences_on_standard_error(program, capsys, kind, code):
    def command() -> None:
        raise kind("Seven of nine.", "Because.", "Do this.")

    assert program(command) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{kind.__name__}: Seven of nine.\n  Because.\n  Do this.\n"


def test_a_refusal_under_json_is_one_object_on_standard_output(program, capsys):
    def command(json: bool = False) -> None:
        raise ConfigError("What.", "Why.", "Do.")

    assert program(command, "--json") == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": {"kind": "ConfigError", "what": "What.", "why": "Why.", "do": "Do."}
    }


def test_an_interruption_ends_with_130(program, capsys):
    def command() -> None:
        raise KeyboardInterrupt

    assert program(command) == 130
    assert capsys.readouterr().err.startswith("Interrupted.")


def test_a_defect_is_not_dressed_up_as_a_refusal(program):
    def command() -> None:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        program(command)


def misused(max_tokens: int = 3, pair: tuple[str, str] | None = None, json: bool = False) -> None:
    raise AssertionError("nothing may run")


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (
            ("--max-tokns", "3"),
            "deepinfer fake has no option --max-tokns. An option that is ignored would leave its "
            "default in force. Did you mean --max-tokens?",
        ),
        (
            ("--qqq",),
            "deepinfer fake has no option --qqq. An option that is ignored would leave its "
            "default in force. See deepinfer fake --help.",
        ),
        (
            ("--pair", "a"),
            "deepinfer fake: Option '--pair' requires 2 arguments. Nothing was run, since what is "
            "meant is not clear. See deepinfer fake --help.",
        ),
    ],
)
def test_words_that_cannot_be_meant_are_refused_in_three_sentences(
    program, capsys, arguments, sentences
):
    assert program(misused, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: ")
    assert " ".join(err.removeprefix("ConfigError: ").split()) == sentences
    assert program(misused, "--json", *arguments) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert f"{error['what']} {error['why']} {error['do']}" == sentences


@pytest.mark.parametrize("typed", [("--max-tokens", "abc"), ("--max-tokens=abc",)])
def test_a_value_of_the_wrong_type_is_named(program, capsys, typed):
    assert program(misused, *typed) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ConfigError: deepinfer fake: --max-tokens is 'abc'."
    assert "integer" in lines[1]
    assert lines[2:] == ["  See deepinfer fake --help."]


def test_an_argument_that_is_missing_is_named(program, capsys):
    def command(prompt: str) -> None:
        raise AssertionError(prompt)

    assert program(command) == 2
    assert "deepinfer fake: Missing argument 'prompt'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "do"), [("evl", "Did you mean eval?"), ("nope", "Name one of these.")]
)
def test_an_unknown_command_is_bad_input(capsys, typed, do):
    with pytest.raises(SystemExit) as caught:
        cli.main([typed])
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"ConfigError: There is no command '{typed}'.\n"
        f"  The commands are {', '.join(cli.COMMANDS)}.\n  {do}\n"
    )


def test_without_arguments_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    assert "Usage: deepinfer" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_loads_and_has_help(name, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert f"deepinfer {name}" in capsys.readouterr().out


def test_help_does_not_import_jax():
    code = (
        "import sys\nfrom deepinfer_jax.entrypoints import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_a_source_tree_that_is_not_installed_runs(monkeypatch, capsys):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "deepinfer-jax not installed\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("deepinfer-jax ")
    assert done.returncode == 0
