"""The simulation against what was published; its figures are simulated, and say so."""

import json
import sys

import pytest

from deepinfer_jax.bench.simulate_varlen import HEAVY, LIGHT, MIDDLE, simulate
from deepinfer_jax.bench.varlen_figure import check_can_draw, draw
from deepinfer_jax.errors import ConfigError


@pytest.fixture(scope="module")
def report():
    told = []
    found = simulate(rounds=12, steps=24, tell=lambda *what: told.append(what))
    assert {what for what, _, _ in told} == {"fitting", "sensitivity", "other loads"}
    return found


@pytest.fixture(scope="module")
def runs(report):
    return {run["load"]: run for run in report["runs"]}


@pytest.fixture(scope="module")
def cases(report):
    return {
        case["case"]: {run["load"]: run for run in case["runs"]} for case in report["sensitivity"]
    }


def test_it_says_what_is_simulated_fitted_chosen_and_predicted(report):
    assert report["kind"] == "simulation" and report["measured"] is False
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    origins = {p["name"]: p["origin"] for p in report["parameters"]}
    assert origins == {
        "mu": "fitted",
        "s1": "chosen",
        "s2": "chosen",
        "t0/kappa": "fitted",
        "delta": "fitted",
    }
    assert all(p["to"] for p in report["parameters"])
    for run in report["runs"]:
        assert ("gain" in run["predicted"]) == (run["load"] == HEAVY)
        assert sorted(run["fitted"] + run["predicted"]) == sorted(run["errors"])
    assert report["settings"] == {
        "seed": 0,
        "rounds": 12,
        "steps": 24,
        "drafts": 5,
        "lag": 2,
        "sizes_every": 8,
    }


def test_fixed_lengths_emit_the_published_number_of_tokens(runs):
    for run in runs.values():
        error = run["errors"]["fixed_accept_length"]
        assert 0 < error < 0.1
        assert run["fixed_accept_length"] == pytest.approx(3.29, abs=3 * error)


def test_the_fit_meets_what_it_was_fitted_to(runs):
    assert runs[LIGHT]["gain"] == pytest.approx(-0.015, abs=1e-9)
    assert runs[MIDDLE]["gain"] == pytest.approx(0.055, abs=0.003)


def test_the_heavy_load_is_predicted_as_published(runs):
    assert runs[HEAVY]["gain"] == pytest.approx(0.11, abs=0.015)


def test_fewer_drafts_are_verified_under_load_and_some_tokens_are_lost(runs):
    light, middle, heavy = (runs[load] for load in (LIGHT, MIDDLE, HEAVY))
    assert 4.4 > light["verified"] > middle["verified"] > heavy["verified"] > 2.5
    for run in runs.values():
        assert 2.9 < run["accept_length"] < run["fixed_accept_length"]


def test_without_overhead_variable_lengths_do_not_lose(cases):
    assert all(run["gain"] > 0 for run in cases["delta 0"].values())


def test_lag_and_wrong_confidences_cost_and_calibration_pays(cases):
    ours, fresh = cases["as fitted"], cases["lag 0"]
    sharp, healed = cases["logits x 1.5"], cases["the same, calibrated"]
    for load in (LIGHT, MIDDLE, HEAVY):
        assert sharp[load]["gain"] < ours[load]["gain"] <= fresh[load]["gain"] + 5e-4
        assert abs(healed[load]["gain"] - ours[load]["gain"]) < 1.5e-3


def test_the_prediction_does_not_hang_on_the_chosen_spreads(cases):
    for case in ("s1 0, fitted again", "s2 4, fitted again"):
        assert cases[case][MIDDLE]["gain"] == pytest.approx(0.055, abs=0.003)
        assert cases[case][HEAVY]["gain"] == pytest.approx(0.11, abs=0.015)


def test_the_figure_says_what_it_rests_on(report, tmp_path):
    paths = [tmp_path / name for name in ("a.svg", "b.svg", "c.png")]
    for path in paths:
        draw(report, path, check_can_draw(path))
    text = paths[0].read_text()
    assert text == paths[1].read_text()
    assert "simulated, not measured" in text and "published" in text
    assert "s1 1 chosen" in text and "lag 2, seed 0" in text
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_another_format_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check_can_draw(tmp_path / "figure.gif")
    assert "figure.gif does not end in .svg or .png." in caught.value.what


def test_a_missing_matplotlib_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError) as caught:
        check_can_draw(tmp_path / "figure.svg")
    assert caught.value.what == "The figure needs matplotlib, which is not installed."
    assert caught.value.do == "Run: pip install 'deepinfer-jax[plots]'."
