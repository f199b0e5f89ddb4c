"""The search for an interpreter, with folders of stand-ins on a PATH of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@pytest.fixture
def folder(tmp_path):
    """Make a folder of executables: name -> shell text, or the path of a real program."""

    def folder(name: str, **programs: str | Path) -> Path:
        made = tmp_path / name
        made.mkdir(parents=True, exist_ok=True)
        for program, body in programs.items():
            path = made / program.replace("_", ".")
            if isinstance(body, Path):
                path.symlink_to(body)
            else:
                path.write_text(f"#!/bin/sh\n{body}\n")
                path.chmod(0o755)
        return made

    return folder


def find(*path: Path, home: Path = Path("/nonexistent"), **extra: str):
    environ = {"PATH": ":".join(map(str, path)), "HOME": str(home), **extra}
    return subprocess.run(
        ["/bin/sh", str(SCRIPTS / "find_python.sh")], env=environ, capture_output=True, text=True
    )


def real(done: subprocess.CompletedProcess) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip()).resolve()


BROKEN = "echo 'command not found' >&2; exit 127"
OLD = "exit 1"


def test_the_interpreter_is_found_behind_another_one(folder):
    assert real(find(folder("a", python3=OLD), folder("b", python3_12=BASE))) == BASE


def test_a_broken_shim_does_not_hide_the_interpreter_after_it(folder):
    first = folder("a", python3_12=BROKEN, python3_13=BROKEN, python3=OLD)
    assert real(find(first, folder("b", python3_12=BASE))) == BASE


def test_a_plain_python3_of_the_right_version_is_found(folder):
    assert real(find(folder("a", python3_12=BROKEN, python3=BASE))) == BASE


def test_a_version_of_pyenv_is_found_without_its_shims(folder, tmp_path):
    folder("home/.pyenv/versions/3.12.7/bin", python=BASE)
    shims = folder("shims", python3_12=BROKEN)
    assert real(find(shims, home=tmp_path / "home")) == BASE


def test_the_root_of_pyenv_is_respected(folder, tmp_path):
    folder("root/versions/3.13.1/bin", python=BASE)
    assert real(find(folder("a"), PYENV_ROOT=str(tmp_path / "root"))) == BASE


def test_uv_s_interpreter_is_found(folder):
    assert real(find(folder("a", uv=f"echo {BASE}"))) == BASE


def test_the_launcher_s_interpreter_is_found(folder):
    assert real(find(folder("a", py=f'shift; exec {BASE} "$@"'))) == BASE


def test_a_named_interpreter_is_the_only_candidate(folder):
    good, bad = folder("a", python3_12=BASE), folder("b", python=OLD)
    assert real(find(good, PYTHON=str(BASE))) == BASE
    done = find(good, PYTHON=str(bad / "python"))
    assert done.returncode == 3
    assert "is not a working Python 3.12 or 3.13" in done.stderr


def test_finding_nothing_says_in_one_sentence_what_to_install(folder):
    done = find(folder("a", python3_12=BROKEN, python3=OLD, uv="exit 2", py="exit 1"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "apt install python3.12-venv" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_environment_that_fits_is_kept(folder, tmp_path):
    folder("venv/bin", python=f'exec {sys.executable} "$@"')
    done = subprocess.run(
        ["/bin/sh", str(SCRIPTS / "create_venv.sh"), str(tmp_path / "venv")],
        env=os.environ | {"PYTHON": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_an_environment_that_does_not_fit_needs_an_interpreter(folder, tmp_path):
    folder("venv/bin", python=OLD)
    done = subprocess.run(
        ["/bin/sh", str(SCRIPTS / "create_venv.sh"), str(tmp_path / "venv")],
        env=os.environ | {"PYTHON": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "PYTHON=/nonexistent is not a working Python" in done.stderr
