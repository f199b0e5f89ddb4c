import json

import pytest

from deepinfer_jax.entrypoints import cli
from deepinfer_jax.entrypoints import doctor as command
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
    assert (report["arithmetic"], report["cache_format"]) == ("f32", "f32")
    assert [row["op"] for row in report["kernels"]] == list(OPS)
    assert report["level"]["name"] == "R1"
    assert {"python", "jax", "jaxlib"} <= set(report["versions"])


def test_the_report_as_text_shows_device_kernels_and_level(doctor):
    code, out, err = doctor("--quiet")
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


def test_caches_that_would_round_what_the_arithmetic_does_not_are_refused(doctor):
    code, out, err = doctor("--set", "engine.cache_format=release")
    assert (code, out) == (2, "")
    assert "engine.cache_format is 'release' with the arithmetic f32." in err
    settings = "--set", "engine.cache_format=bf16", "--set", "engine.arithmetic=release", "--json"
    assert json.loads(doctor(*settings)[1])["cache_format"] == "bf16"


def test_a_kernel_that_does_not_exist_is_refused_in_the_report(doctor, monkeypatch):
    monkeypatch.setenv("DEEPINFER_KERNEL_TOPK", "nope")
    code, out, err = doctor("--json")
    report = json.loads(out)
    assert code == 3
    assert "topk has no kernel named 'nope'" in report["refusal"]["what"]
    assert report["refusal"]["what"] in err
    assert report["device"]["kind"] == "cpu"
    assert (report["kernels"], report["level"]) == ([], None)


def test_a_machine_without_devices_is_reported(doctor, monkeypatch):
    def devices():
        raise RuntimeError("No tpu.\nMore.")

    monkeypatch.setattr("jax.devices", devices)
    code, out, err = doctor("--json")
    report = json.loads(out)
    assert code == 3
    assert report["device"] is None
    assert report["model"]["name"] == "nano"
    assert "It says: No tpu." in err
    code, out, _ = doctor()
    assert code == 3
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("device")] == [
        ["device", "none"]
    ]


def test_a_package_that_is_not_installed_is_shown_as_such(doctor, monkeypatch):
    monkeypatch.setattr(command, "versions", lambda: {"deepinfer-jax": None})
    assert "deepinfer-jax not installed" in doctor()[1]


def test_a_missing_model_is_reported_and_does_not_hide_the_rest(doctor):
    code, out, _ = doctor("--json", "--set", "engine.model=nono")
    report = json.loads(out)
    assert code == 0
    assert "There is no model 'nono'" in report["model"]["error"]
    assert report["kernels"]


def test_a_repository_is_not_looked_for(doctor):
    code, out, _ = doctor("--json", "--set", "engine.model=owner/name")
    model = json.loads(out)["model"]
    assert code == 0
    assert model["note"] == (
        "a Hugging Face repository, unless a folder is meant; doctor downloads nothing"
    )
    assert "error" not in model


@pytest.mark.parametrize("name", ["/no/where", "./where", "a/b/c"])
def test_a_path_is_no_repository(doctor, name):
    _, out, _ = doctor("--json", "--set", f"engine.model={name}")
    assert "There is no model" in json.loads(out)["model"]["error"]


def test_the_report_can_be_kept_in_a_file(doctor, tmp_path):
    code, out, _ = doctor("--json", "--out", str(tmp_path / "report.json"))
    assert code == 0
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(out)


def test_a_file_that_cannot_be_written_is_refused_first(doctor, tmp_path):
    code, out, err = doctor("--out", str(tmp_path / "no" / "report.json"))
    assert (code, out) == (2, "")
    assert f"report.json cannot be written: there is no folder {tmp_path / 'no'}." in err


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
    assert ".." not in err
    kind, why, do = err.splitlines()[-3:]
    assert kind == ("NoKernelError: Level R3 is asked for, and R1 is the highest within reach.")
    assert why.startswith("  R1 holds because ")
    assert do == (
        "  Ask for R1 at most; R2 needs DEEPINFER_BATCH_INVARIANT=1; R3 needs a seq_seed per "
        "request."
    )


def test_batch_invariant_kernels_reach_the_level_that_promises_equal_bits(doctor, monkeypatch):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    code, out, _ = doctor("--level", "R2", "--json")
    report = json.loads(out)
    assert (code, report["refusal"], report["level"]["name"]) == (0, None, "R2")
    assert all(row["batch_invariant"] for row in report["kernels"])
    assert doctor("--level", "R3")[0] == 0
    code, _, err = doctor("--set", "engine.kernels.linear=xla")
    assert code == 3
    assert "No kernel of op linear fits cpu with batch invariance." in err
    assert "xla: not batch invariant; batch invariant on cpu are: rowwise tiles, mhc row" in err


@pytest.mark.parametrize("asked", ["R0", "R1", "R2", "R3", "R4"])
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_what_is_missing_is_said_of_every_level(doctor, monkeypatch, asked, invariant):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", invariant)
    code, out, err = doctor("--level", asked)
    reached = "R3" if invariant == "1" else "R1"
    assert code == (0 if asked <= reached else 3)
    assert "R4 needs a network that is split over devices" in " ".join(out.split())
    if asked <= reached:
        return
    assert f"Level {asked} is asked for, and {reached} is the highest within reach." in err
    named = [name for name in ("R2", "R3", "R4") if f"{name} needs " in err.splitlines()[-1]]
    first = "R2" if invariant == "0" else "R3"
    assert named == [name for name in ("R2", "R3", "R4") if first <= name <= asked]


def test_a_level_out_of_reach_is_part_of_the_one_json_document(doctor):
    code, out, _ = doctor("--level", "R2", "--json")
    report = json.loads(out)
    assert code == 3
    assert report["refusal"]["what"].startswith("Level R2 is asked for")
    assert report["level"]["name"] == "R1"
    assert json.loads(doctor("--level", "R1", "--json")[1])["refusal"] is None


def test_an_unknown_level_is_bad_input(doctor):
    code, _, err = doctor("--level", "R9")
    assert code == 2
    assert "There is no determinism level 'R9'." in err


@pytest.mark.parametrize(("drafts", "code"), [("0", 0), ("5", 3), (None, 3)])
def test_pages_that_may_run_out_are_told_where_drafts_depend_on_them(
    doctor, monkeypatch, drafts, code
):
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "1")
    if drafts is not None:
        monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", drafts)
    settings = "--set", "engine.pages=40", "--set", "engine.verification=block"
    made, _, err = doctor("--level", "R3", *settings)
    assert made == code
    assert ("R3 needs engine.pages left out or engine.verification=coupled" in err) == (code == 3)
