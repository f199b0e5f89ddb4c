"""The command `deepinfer batch`, with an engine that says prompts backwards."""

import dataclasses
import io
import json
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from protocol.batch_lines import line, write
from protocol.fake_engine import FakeEngine
from rich.console import Console

from deepinfer_jax import settings
from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.meter import Snapshot
from deepinfer_jax.entrypoints import batch
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.request import RequestOutput

IDLE = replace(Snapshot(*[0] * len(fields(Snapshot))), acceptance=Acceptance.empty(0))
LINES = tuple(line(f"r{i}", model="nano") for i in range(5))


class Opened(FakeEngine):
    """As much of `LLM` as the command uses; the manifest follows from the overrides."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__(on=self.stop_at)
        self.arguments = arguments
        self.stop: int | None = None

    def manifest(self) -> dict[str, Any]:
        return {"config": list(self.arguments["overrides"] or ()), "settings": []}

    @property
    def snapshot(self) -> Snapshot:
        return replace(IDLE, output_tokens=10 * len(self.asked))

    def watch(self, callback: Any) -> None:
        self.watched = callback

    def _one(self, ask: Ask) -> RequestOutput:
        made = super()._one(ask)
        if self.arguments["truncate"] is None or ask.name not in ("r1", "r3"):
            return made
        return dataclasses.replace(made, metrics={"truncated_tokens": 4.0})

    def stop_at(self, index: int) -> None:
        if index == self.stop:
            raise KeyboardInterrupt


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    engines: list[Opened] = []
    stop: list[int] = []

    def open_engine(live: Live, **arguments: Any) -> Opened:
        engine = Opened(arguments)
        engine.stop = stop.pop() if stop else None
        engines.append(engine)
        return engine

    monkeypatch.setattr(batch, "open_engine", open_engine)
    monkeypatch.setattr(Opened, "next_stop", stop, raising=False)
    return engines


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "results.jsonl").read_text().splitlines()]


def test_a_file_is_answered_into_a_folder(deepinfer, opened, tmp_path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    code, said, told = deepinfer("batch", str(source), "-o", str(out))
    assert code == 0
    first, second = said.splitlines()
    assert first.startswith("5 requests: 5 answered, 0 errors, stop 5, 0:0")
    digest = json.loads((out / "run.json").read_text())["requests"]["digest"]
    assert second == f"{out / 'results.jsonl'}  run digest {digest}"
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results(out)}
    assert texts == {f"r{i}": f"{i}r" for i in range(5)}
    assert results(out)[0]["response"]["body"]["system_fingerprint"].startswith("fp_")
    assert "answering" in told


def test_quiet_leaves_standard_error_empty(deepinfer, opened, tmp_path):
    source = write(tmp_path, b"{", *LINES)
    assert deepinfer("batch", str(source), "-o", str(tmp_path / "o"), "--quiet")[2] == ""


def test_prompts_that_were_cut_are_counted_in_summary_record_and_results(
    deepinfer, opened, tmp_path
):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    words = ("batch", str(source), "-o", str(out), "--truncate", "left")
    code, said, _ = deepinfer(*words)
    assert (code, opened[0].arguments["truncate"]) == (0, "left")
    assert "stop 5, 2 with truncated prompts, 0:00" in said
    cut = {r["custom_id"]: r["deepinfer"]["truncated_tokens"] for r in results(out)}
    assert cut == {"r0": 0, "r1": 4, "r2": 0, "r3": 4, "r4": 0}
    # A second run answers nothing, and its record counts what the first one left.
    assert json.loads(deepinfer(*words, "--json")[1])["requests"]["truncated"] == 2
    assert json.loads((out / "run.json").read_text())["requests"]["truncated"] == 2


def test_json_is_the_record_of_the_run(deepinfer, opened, tmp_path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    code, said, _ = deepinfer("batch", str(source), "-o", str(out), "--json", "--quiet")
    printed, kept = json.loads(said), json.loads((out / "run.json").read_text())
    for record in (printed, kept):
        record.pop("time")
    assert code == 0
    assert printed == kept
    assert kept["drafts"] is None


def test_drafts_are_counted_by_request_and_over_the_run(deepinfer, opened, tmp_path, monkeypatch):
    plain_one, found = Opened._one, Acceptance.empty(2)

    def one(self, ask):
        found.count(2, 1)
        made = plain_one(self, ask)
        drafted = (dataclasses.replace(s, drafted=2, accepted=1) for s in made.outputs)
        return dataclasses.replace(made, outputs=tuple(drafted))

    def snapshot(self):
        return replace(IDLE, acceptance=found.copy())

    monkeypatch.setattr(Opened, "_one", one)
    monkeypatch.setattr(Opened, "snapshot", property(snapshot))
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    code, said, told = deepinfer("batch", str(source), "-o", str(out), "--json")
    printed, kept = json.loads(said), json.loads((out / "run.json").read_text())
    assert code == 0
    assert printed["drafts"] == kept["drafts"]
    assert printed["drafts"]["kept_by_place"] == [5, 0]
    assert printed["drafts"]["tokens_per_step"] == 2
    counts = {(r["deepinfer"]["drafted"], r["deepinfer"]["accepted"]) for r in results(out)}
    assert counts == {(2, 1)}
    assert "5 of 10 drafts kept: 2.00 tokens a step of a sequence" in told


def test_bad_lines_are_told_before_the_engine_opens_and_end_with_1(deepinfer, opened, tmp_path):
    source, out = write(tmp_path, LINES[0], b"{", line("x", model="gpt")), tmp_path / "out"
    code, said, told = deepinfer("batch", str(source), "-o", str(out))
    assert code == 1
    assert said.startswith("3 requests: 1 answered, 2 errors, stop 1, ")
    assert "2 of 3 lines are no requests that can be served" in told
    errors = [json.loads(text) for text in (out / "errors.jsonl").read_text().splitlines()]
    assert "Line 2 is no JSON" in errors[0]["error"]["message"]
    assert "names the model 'gpt'" in errors[1]["error"]["message"]


def test_an_interrupted_run_is_kept_and_goes_on(deepinfer, opened, tmp_path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    Opened.next_stop.append(1)  # type: ignore[attr-defined]
    code, said, told = deepinfer("batch", str(source), "-o", str(out))
    assert (code, said) == (130, "")
    assert told.splitlines()[-1] == "Interrupted. What was finished is kept."
    assert [r["custom_id"] for r in results(out)] == ["r2"]
    code, _, told = deepinfer("batch", str(source), "-o", str(out), "--ordered")
    assert code == 0
    assert "resuming: 1 done, 4 to go" in told
    assert [r["custom_id"] for r in results(out)] == [f"r{i}" for i in range(5)]
    assert len(opened[1].asked) == 4


def test_another_engine_is_refused_unless_forced(deepinfer, opened, tmp_path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    words = ("batch", str(source), "-o", str(out), "--quiet")
    assert deepinfer(*words)[0] == 0
    code, said, told = deepinfer(*words, "--set", "engine.max_num_seqs=2", "--json")
    assert code == 2
    assert json.loads(said)["error"]["kind"] == "ConfigError"
    assert "holds 5 results of another run; what differs: config." in told
    assert deepinfer(*words, "--set", "engine.max_num_seqs=2", "--resume=force")[0] == 0
    assert json.loads((out / "run.json").read_text())["breaks"][0]["differ"] == ["config"]
    code, _, told = deepinfer(*words, "--resume", "never")
    assert (code, "holds 5 results of an earlier run" in told) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("in.jsonl -o out --resume=always", "--resume is 'always'."),
        ("none.jsonl -o out", "none.jsonl cannot be read"),
    ],
)
def test_bad_input_is_refused_before_the_engine_opens(
    deepinfer, opened, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, *LINES)
    code, _, told = deepinfer("batch", *shlex.split(arguments))
    assert code == 2
    assert words in told
    assert opened == []
    assert not (tmp_path / "out").exists()


def test_requests_may_give_the_model_s_names(deepinfer, opened, tmp_path):
    named = [("/models/v41", None), ("v41", None), ("gpt-x", "gpt-x"), ("other", "gpt-x")]
    source = write(tmp_path, *(line(f"{i}", model=m) for i, (m, _) in enumerate(named)))
    words = ("batch", str(source), "--model", "/models/v41", "--served-model-name", "gpt-x")
    deepinfer(*words, "-o", str(tmp_path / "out"), "--quiet")
    found = {r["custom_id"]: r["error"] is None for r in results(tmp_path / "out")}
    assert found == {"0": True, "1": True, "2": True, "3": False}
    assert opened[0].arguments["model"] == "/models/v41"


def test_without_a_model_option_the_engine_s_setting_names_it(tmp_path, monkeypatch):
    assert batch._names(None, None, []) == {"nano"}
    assert batch._names(None, None, ["engine.model=/a/b"]) == {"/a/b", "b"}
    monkeypatch.setattr(settings, "load", lambda *a, **k: pytest.fail("not needed"))
    assert batch._names("owner/name", None, []) == {"owner/name", "name"}


def test_a_run_leaves_a_line_of_metrics_even_if_it_was_shorter_than_a_second(
    deepinfer, opened, tmp_path
):
    source, out = write(tmp_path, *LINES, b"{"), tmp_path / "out"
    Opened.next_stop.append(1)  # type: ignore[attr-defined]
    words = ("batch", str(source), "-o", str(out), "--quiet")
    assert deepinfer(*words)[0] == 130
    assert deepinfer(*words)[0] == 1
    lines = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(x["requests"], x["done"], x["failed"]) for x in lines] == [(6, 1, 1), (6, 5, 1)]
    assert [x["output_tokens"] for x in lines] == [30, 40]
    assert opened[1].watched is None


def test_options_reach_the_engine(deepinfer, opened, tmp_path):
    source = write(tmp_path, *LINES)
    words = ("batch", str(source), "-o", str(tmp_path / "o"), "--quiet", "--compile", "all")
    assert deepinfer(*words)[0] == 0
    assert opened[0].arguments["compile"] == "all"


def test_a_terminal_shows_it(opened, tmp_path, monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(batch, "Live", lambda quiet: Live(quiet, terminal))
    source = write(tmp_path, *LINES)
    batch.command(source, tmp_path / "out")
    assert "of 5 requests" in terminal.file.getvalue()  # type: ignore[attr-defined]
