"""The command `plan`: what it prints, for which model and memory, and how it refuses."""

import json

import pytest

from deepinfer_jax.entrypoints.plan import bytes_of
from deepinfer_jax.errors import ConfigError

TINY = ("plan", "--config", "tiny", "--quiet")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1073741824", 1 << 30),
        ("80GiB", 80 << 30),
        ("80 gib", 80 << 30),
        ("24GB", 24 * 10**9),
        ("1.5MiB", 3 << 19),
        ("2 KB", 2000),
        ("7b", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_memory_is_bytes_or_a_number_with_a_unit(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-5", "0", "5 parsecs", "1e9", "80GiBB", "0.1b"])
def test_what_is_no_memory_is_refused(text):
    with pytest.raises(ConfigError, match="Write for example 80GiB"):
        bytes_of(text)


def test_the_table_shows_every_part_the_sizes_and_what_fits(deepinfer):
    code, out, err = deepinfer(*TINY, "--memory", "64MiB")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for part in ("weights", "Engram tables", "window rings", "main KV pages", "index key pages",
                 "other slot state", "step", "total", "available 64.000 MiB", "left"):  # fmt: skip
        assert part in words
    assert "8 sequences of 1024 tokens, 64 pages of 128 tokens, steps of 64 tokens" in words
    assert "fits yes" in words and "at most max_model_len 1024, or max_num_seqs" in words


def test_drafts_are_planned_where_they_are_asked_for(deepinfer):
    none = ("--memory", "64MiB", "--set", "engine.nextn=0")
    assert "draft" not in deepinfer(*TINY, *none)[1]
    how = ("--memory", "64MiB")
    code, out, _ = deepinfer(*TINY, *how, "--set", "engine.verification=rejection")
    words = " ".join(out.split())
    assert code == 0 and "drafts 5 of each sequence a step, verification rejection" in words
    assert "draft log-probs 0.044 MiB" in words  # 8 x 5 x 288 in float32
    report = json.loads(deepinfer(*TINY, *how, "--set", "engine.sampler=original", "--json")[1])
    assert (report["verification"], report["plan"]["drafts"]) == ("original", 5)
    coupled = json.loads(deepinfer(*TINY, *how, "--json")[1])["plan"]
    assert coupled["draft_logprobs"] == 0 < report["plan"]["draft_logprobs"]
    plain = json.loads(deepinfer(*TINY, *none, "--json")[1])["plan"]
    assert coupled["weights"] > plain["weights"] and coupled["windows"] > plain["windows"]


def test_a_length_that_memory_decides_is_told_as_such(deepinfer):
    assert "as long as memory holds" not in deepinfer(*TINY, "--memory", "64MiB")[1]
    code, out, _ = deepinfer(*TINY, "--memory", "26MiB")
    assert code == 0 and "as long as memory holds; the model's limit is 1024 tokens" in out


def test_the_record_adds_up_and_needs_neither_weights_nor_the_device(deepinfer):
    words = ("--memory", "80GiB", "--device", "sm90", "--json", "--set", "engine.pages=100")
    code, out, _ = deepinfer(*TINY, *words)
    report = json.loads(out)
    plan = report["plan"]
    assert code == 0 and report["refusal"] is None and report["alternatives"] == []
    assert (report["model"], report["arithmetic"]) == ("tiny", "release")
    assert report["device"] == {"kind": "sm90", "name": "sm90"}
    assert (plan["free"], plan["pages"], plan["fits"]) == (80 << 30, 100, True)
    assert plan["left"] == plan["free"] - plan["total"]
    assert len(report["config"]) == 64


def test_what_does_not_fit_exits_with_three_and_offers_that_pass(deepinfer):
    sizes = ("--set", "engine.max_num_seqs=64", "--set", "engine.max_model_len=1024")
    asked = (*TINY, "--memory", "48MiB", *sizes)
    code, out, err = deepinfer(*asked, "--json")
    report = json.loads(out)
    assert code == 3
    assert err.startswith("MemoryPlanError: The engine needs")
    assert report["refusal"]["what"] in err and report["plan"]["fits"] is False
    assert len(report["alternatives"]) == 3
    way = report["alternatives"][0]
    changes = [word for k, v in way["set"].items() for word in ("--set", f"{k}={v}")]
    code, out, _ = deepinfer(*asked, *changes, "--json")
    assert code == 0 and json.loads(out)["plan"]["total"] == way["total"] <= 48 << 20
    said = " ".join(deepinfer(*asked)[1].split())
    assert "fits no" in said and "instead engine.max_num_seqs=" in said


def test_a_model_folder_is_planned_without_its_weights(
    deepinfer, tiny_folder, monkeypatch, tmp_path
):
    def planned(folder, *words):
        given = ("plan", "--model", str(folder), "--device", "cpu", "--memory", "96MiB")
        return json.loads(deepinfer(*given, "--json", "--quiet", *words)[1])["plan"]

    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    tables = ("--set", "engine.engram=host")
    stored, described = planned(tiny_folder, *tables), planned(tmp_path, *tables)
    assert stored == described and stored["engram_tables"] > 0
    monkeypatch.setattr("deepinfer_jax.assembly.open_checkpoint", None)
    assert planned(tiny_folder)["slots"] == 16


def test_without_memory_the_device_here_is_asked_and_an_absent_one_is_unknown(
    deepinfer, monkeypatch
):
    monkeypatch.setattr("deepinfer_jax.entrypoints.plan.free_bytes", lambda device: 1 << 26)
    code, out, _ = deepinfer(*TINY, "--json")
    assert code == 0 and json.loads(out)["plan"]["free"] == 1 << 26
    code, out, _ = deepinfer(*TINY, "--device", "tpu")
    assert code == 0 and "unknown: pass --memory" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--memory", "much"), 2, "--memory is 'much'."),
        (("--device", "sm9"), 3, "There is no device kind 'sm9'."),
        (("--set", "engine.max_model_len=5000"), 2, "the model's limit is 1024"),
        (("--model", "nono"), 2, "nono"),
    ],
)
def test_what_cannot_be_planned_is_refused(deepinfer, words, code, message):
    found, _, err = deepinfer(*TINY, *words)
    assert found == code and message in err


def test_the_record_can_be_kept_in_a_file(deepinfer, tmp_path):
    _, out, _ = deepinfer(
        *TINY, "--memory", "64MiB", "--json", "--out", str(tmp_path / "plan.json")
    )
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(out)
