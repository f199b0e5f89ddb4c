"""`deepinfer bench --simulate-varlen`: what it prints, writes and refuses."""

import json
from functools import partial

import pytest

from deepinfer_jax.bench import simulate_varlen


@pytest.fixture
def bench(deepinfer, monkeypatch):
    """Types the command, with few chances."""
    few = partial(simulate_varlen.simulate, rounds=4, steps=6)
    monkeypatch.setattr(simulate_varlen, "simulate", few)
    return partial(deepinfer, "bench")


def test_tables_say_what_is_fitted_and_what_predicted(bench):
    code, out, err = bench("--simulate-varlen", "--quiet")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert words.startswith("Simulated, not measured:")
    lines = [line.split() for line in out.splitlines()]
    (light,) = (line for line in lines if line[:1] == ["16"])
    (heavy,) = (line for line in lines if line[:1] == ["96"])
    assert (light[-3:], heavy[-3:]) == (["-1.5", "%", "fitted"], ["+11", "%", "predicted"])
    for said in ("published 3.2 to 4.4", "published 3.20", "t0/kappa", "the same, calibrated"):
        assert said in words, said


def test_json_and_files_hold_the_same_report(bench, tmp_path):
    out, plot = tmp_path / "report.json", tmp_path / "figure.svg"
    words = ("--simulate-varlen", "--seed", "4", "--json", "--out", str(out), "--plot", str(plot))
    code, printed, err = bench(*words)
    report = json.loads(printed)
    assert code == 0 and "simulating, fitting" in err
    assert json.loads(out.read_text()) == report
    assert report["measured"] is False and report["settings"]["seed"] == 4
    assert "seed 4" in plot.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--simulate-varlen", "--model", "nano"), "--model was given with --simulate-varlen."),
        (("--simulate-varlen", "--batch-sizes", "4"), "--sequences was given with"),
        (("--simulate-varlen", "--repeats", "3"), "--repeats was given with --simulate-varlen."),
        (("--plot", "a.svg"), "--plot was given without --simulate-varlen."),
        (("--simulate-varlen", "--plot", "a.pdf"), "a.pdf does not end in .svg or .png."),
        (("--simulate-varlen", "--plot", "no/a.svg"), "there is no folder no"),
        (("--simulate-varlen", "--out", "no/a.json"), "there is no folder no"),
        (("--simulate-varlen", "--seed", "-1"), "--seed is '-1'"),
    ],
)
def test_what_would_be_ignored_or_lost_is_refused(bench, words, message):
    code, out, err = bench(*words)
    assert (code, out) == (2, "") and message in err
