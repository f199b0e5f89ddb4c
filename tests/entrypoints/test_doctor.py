import json

import pytest

from deepinfer_jax.entrypoints import cli
from deepinfer_jax.ops.table import OPS


@pytest.fixture
def doctor(capsys):
    def doctor(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["doctor", *arguments])
        assert isinstance(caught.value.code, int)
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return doctor


def test_the_report_as_json_is_complete(doctor):
    code, out, _ = doctor("--json")
    report = json.loads(out)
    assert code == 0
    assert report["device"] == {"kind": "cpu", "name": "cpu", "count": 8}
    assert report["model"]["name"] == "nano"
    assert report["arithmetic"] == "f32"
    assert [row["op"] for row in report["kernels"]] == list(OPS)
    assert report["level"]["name"] == "R1"
    assert {"python", "jax", "jaxlib"} <= set(report["versions"])


def test_the_report_as_text_shows_device_kernels_and_level(doctor):
    code, out, err = doctor()
    assert (code, err) == (0, "")
    assert "cpu x 8" in out
    assert "no DEEPINFER_ variable is set" in out
    assert "all at their defaults" in out
    assert "R1: same batches and layout, same bits" in out
    for op in OPS:
        assert op in out


def test_settings_and_variables_are_shown_with_their_source(doctor, monkeypatch):
    monkeypatch.setenv("DEEPINFER_KERNEL_TOPK", "full_sort")
    _, out, _ = doctor("--set", "engine.max_num_seqs=3")
    assert "DEEPINFER_KERNEL_TOPK=full_sort" in out
    assert "engine.max_num_seqs=3 (--set)" in out
    assert "engine.kernels.topk=full_sort (environment)" in out
    assert "asked for by name" in out


def test_a_kernel_that_does_not_exist_cannot_run_here(doctor, monkeypatch):
    monkeypatch.setenv("DEEPINFER_KERNEL_TOPK", "nope")
    code, out, err = doctor()
    assert (code, out) == (3, "")
    assert "Op topk has no kernel named 'nope'" in err


def test_a_missing_model_is_reported_and_does_not_hide_the_rest(doctor):
    code, out, _ = doctor("--json", "--set", "engine.model=nono")
    report = json.loads(out)
    assert code == 0
    assert "There is no model 'nono'" in report["model"]["error"]
    assert report["kernels"]


def test_a_misspelt_variable_is_bad_input(doctor, monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIENT", "1")
    code, _, err = doctor()
    assert code == 2
    assert "Did you mean DEEPINFER_BATCH_INVARIANT?" in err


def test_a_level_within_reach_is_accepted(doctor):
    assert doctor("--level", "R1")[0] == 0


def test_a_level_out_of_reach_cannot_run_here(doctor):
    code, out, err = doctor("--level", "R3")
    assert code == 3
    assert "level" in out
    assert "Level R3 is asked for, and R1 is the highest within reach." in err


def test_an_unknown_level_is_bad_input(doctor):
    code, _, err = doctor("--level", "R9")
    assert code == 2
    assert "There is no determinism level 'R9'." in err
