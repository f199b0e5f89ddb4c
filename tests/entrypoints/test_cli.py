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


def test_an_unknown_option_is_bad_input(program, capsys):
    assert program(lambda: None, "--nope") == 2
    assert "--nope" in capsys.readouterr().err


def test_an_unknown_command_is_bad_input(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["nope"])
    assert caught.value.code == 2
    assert "nope" in capsys.readouterr().err


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


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_jax", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("deepinfer-jax ")
    assert done.returncode == 0
