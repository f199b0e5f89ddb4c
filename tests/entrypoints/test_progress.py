import io

import pytest
from rich.console import Console

from deepinfer_jax.entrypoints import progress
from deepinfer_jax.entrypoints.progress import Live


def screen(terminal: bool) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=120,
        color_system=None,
        legacy_windows=False,
    )


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, as a list of one."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def task(live):
    assert live._progress is not None
    (only,) = live._progress.tasks
    return only


def test_on_a_terminal_bytes_are_a_bar_that_leaves_nothing_behind(clock):
    terminal = screen(True)
    with Live(console=terminal) as live:
        live.report("load", 5_000_000, 20_000_000)
        assert (task(live).description, task(live).percentage) == ("loading weights", 25)
        assert task(live).fields["detail"] == "5 of 20 MB"
        clock[0] = 30.0
        live.report("load", 10_000_000, 20_000_000)
        assert task(live).fields["detail"] == "10 of 20 MB, 0:30 left"
        live.doing("computing", "7 tokens")
        assert task(live).fields["detail"] == "7 tokens"
        live.clear()
        assert live._progress is None
    assert terminal.file.getvalue().endswith("\x1b[2K")


def test_a_line_without_a_known_end_has_no_bar():
    terminal = screen(True)
    with Live(console=terminal) as live:
        live.doing("computing")
        live._progress.refresh()
        assert "━" not in terminal.file.getvalue()
        live.doing("computing", done=1, total=2)
        live._progress.refresh()
        assert "━" in terminal.file.getvalue()


def test_on_a_terminal_a_compilation_is_shown_in_the_line():
    terminal = screen(True)
    with Live(console=terminal) as live:
        live.doing("compiling")
        live.report("compiled decode, 1 rows", 2.0, 2.0)
        assert task(live).fields["detail"] == "(compiled decode, 1 rows in 2.0 s)"


def test_a_compilation_during_an_answer_is_said_after_it():
    terminal = screen(True)
    with Live(console=terminal) as live:
        live.report("compiled decode, 4 rows", 2.0, 2.0)
        assert terminal.file.getvalue() == ""
    assert terminal.file.getvalue() == "compiled decode, 4 rows in 2.0 s\n"


def test_compiling_ahead_is_a_bar_over_programs():
    with Live(console=screen(True)) as live:
        live.report("compile", 3, 12)
        assert (task(live).description, task(live).percentage) == ("compiling", 25)
        assert task(live).fields["detail"] == "3 of 12 programs"


@pytest.mark.parametrize("shown", [True, False])
def test_a_late_compilation_is_a_line_that_stays(shown):
    for terminal in (True, False):
        console = screen(terminal)
        with Live(console=console) as live:
            if shown:
                live.doing("computing")
            live.report("compiled late: step, 64 rows: no reason", 2.0, 2.0)
        lines = console.file.getvalue().splitlines()
        assert any("compiled late: step, 64 rows: no reason in 2.0 s" in text for text in lines)


@pytest.mark.parametrize("shown", [True, False])
def test_an_alarm_is_a_line_that_stays(shown):
    for terminal in (True, False):
        console = screen(terminal)
        with Live(console=console) as live:
            if shown:
                live.doing("computing")
            live.report("alarm: Draft 2 is wrong.", 0, 0)
        lines = console.file.getvalue().splitlines()
        assert any(text.endswith("alarm: Draft 2 is wrong.") for text in lines)


def test_time_that_is_left_follows_from_what_this_phase_has_done(clock):
    with Live(console=screen(True)) as live:
        live.doing("answering", done=60, total=100, before=60)
        clock[0] = 10.0
        live.doing("answering", done=80, total=100, before=60)
        assert task(live).fields["detail"] == "0:10 left"


def test_elsewhere_each_phase_is_one_line_and_a_long_one_is_repeated(clock):
    plain = screen(False)
    with Live(console=plain) as live:
        for done in range(100):
            live.report("load", done * 1e6, 100e6)
        live.report("compiled decode, 1 rows", 2.0, 2.0)
        live.doing("computing", "1 of 9", done=1, total=9)
        clock[0] = 10.0
        live.doing("computing", "2 of 9", done=2, total=9)
        clock[0] = 3000.0
        live.doing("computing", "3 of 9", done=3, total=9)
    assert plain.file.getvalue().splitlines() == [
        "loading weights 0 of 100 MB",
        "compiled decode, 1 rows in 2.0 s",
        "computing 1 of 9",
        "computing 3 of 9, 1:40:00 left",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_quiet_line_says_nothing(terminal):
    told = screen(terminal)
    with Live(quiet=True, console=told) as live:
        live.report("load", 1, 2)
        live.report("compiled decode, 1 rows", 2.0, 2.0)
        live.note("A line.")
    assert told.file.getvalue() == ""


def test_standard_output_stays_clean(capsys):
    with Live() as live:
        live.doing("computing")
        live.note("A line.")
    assert capsys.readouterr() == ("", "computing\nA line.\n")
