"""The folder of a run: what is there after any stop, and when a run may go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from protocol import slow_run
from protocol.batch_lines import line, write
from protocol.fake_engine import SERVED, FakeEngine

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.protocol import result_file
from deepinfer_jax.protocol.batch import answer_batch
from deepinfer_jax.protocol.batch_file import read_batch
from deepinfer_jax.protocol.journal import Journal

ENGINE = {"config": "one", "kernels": [1, 2], "settings": ["path"]}
LINES = tuple(line(f"r{i}") for i in range(8))


class Stopped(Exception):
    """Stands for whatever ends a run early."""


def run(
    source: Path,
    out: Path,
    *,
    engine: dict[str, Any] = ENGINE,
    stop: int | None = None,
    **options: Any,
) -> tuple[dict[str, Any], int]:
    """Run to the end, or until `stop` results; run.json and how many requests were asked."""
    fake = FakeEngine()
    batch = read_batch(source, SERVED)
    with Journal(out, batch, engine, **options) as journal:
        done = frozenset(journal.done)
        made = answer_batch(batch, done, fake.answer, fake.tokenizer, clock=lambda: 1)
        for count, (result, _) in enumerate(made):
            if count == stop:
                raise Stopped
            journal.append(result)
    return json.loads((out / "run.json").read_text()), len(fake.asked)


def stopped(source: Path, out: Path, after: int) -> None:
    with pytest.raises(Stopped):
        run(source, out, stop=after)


def ids(out: Path) -> list[str]:
    lines = (out / "results.jsonl").read_text().splitlines()
    return [json.loads(text)["custom_id"] for text in lines]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def test_a_run_leaves_results_and_their_record(tmp_path: Path):
    source = write(tmp_path, *LINES)
    record, asked = run(source, tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert asked == 8
    assert sorted(ids(out)) == [f"r{i}" for i in range(8)]
    assert names(out) == ["results.jsonl", "run.json"]
    assert record["finished"] is True
    assert record["breaks"] == []
    assert record["engine"]["manifest"] == ENGINE
    requests = record["requests"]
    assert (requests["count"], requests["errors"]) == (8, 0)
    assert requests["finish_reasons"] == {"stop": 8}
    assert record["input"] == {"lines": 8, "digest": f"sha256:{read_batch(source, ()).digest}"}
    assert str(tmp_path) not in json.dumps(record)


def test_failed_lines_are_repeated_in_a_file_of_their_own(tmp_path: Path):
    out = tmp_path / "out"
    source = write(tmp_path, b"{", line("a", prompt="too long"), line("b"), line("b", n=3))
    record, _ = run(source, out)
    failed = [json.loads(text) for text in (out / "errors.jsonl").read_text().splitlines()]
    assert [f["custom_id"] for f in failed] == [None, "b", "a"]
    assert record["requests"]["errors"] == 3
    assert record["requests"]["count"] == 4
    assert record["finished"] is True


def test_a_stopped_run_goes_on_and_ends_as_an_unbroken_one(tmp_path: Path):
    source = write(tmp_path, *LINES, b"{", line("c", prompt="too long"))
    whole, _ = run(source, tmp_path / "whole")
    out = tmp_path / "out"
    stopped(source, out, 5)
    assert json.loads((out / "run.json").read_text())["finished"] is False
    record, asked = run(source, out)
    assert asked == 9 - 4  # the bad line came first among the five
    assert record["requests"] == whole["requests"]
    assert sorted(map(str, ids(out))) == sorted(map(str, ids(tmp_path / "whole")))
    again, asked = run(source, out)
    assert asked == 0
    assert again["requests"] == whole["requests"]
    assert again["run_id"] == record["run_id"] != whole["run_id"]


def test_a_reordered_input_goes_on(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 5)
    write(tmp_path, *reversed(LINES))
    record, asked = run(source, out)
    assert asked == 3
    assert record["requests"]["count"] == 8
    assert record["breaks"] == []


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_line_that_was_being_written_is_dropped_and_done_again(tmp_path: Path, cut: int):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 5)
    path = out / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:cut])
    record, asked = run(source, out)
    assert asked == 4
    assert sorted(ids(out)) == [f"r{i}" for i in range(8)]
    assert record["requests"]["count"] == 8


def test_a_kill_before_the_first_result_is_no_break(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_bytes(b"")
    assert run(source, out)[1] == 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": "two"}, "config"),
        ({"checkpoint": "new"}, "checkpoint"),
        ({"config": "two", "kernels": []}, "config, kernels"),
    ],
)
def test_another_engine_is_refused_by_what_differs(
    tmp_path: Path, change: dict[str, Any], named: str
):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    with (out / "results.jsonl").open("ab") as file:
        file.write(b'{"half')
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError) as caught:
        run(source, out, engine=ENGINE | change)
    error = caught.value
    assert error.what == f"{out} holds 3 results of another run; what differs: {named}."
    assert error.why.endswith("cannot be told apart.")
    assert "--resume=force" in error.do
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_a_changed_setting_is_refused_by_its_name(tmp_path: Path):
    def engine(**values: Any) -> dict[str, Any]:
        rows = [{"key": f"engine.{k}", "value": v, "source": "x"} for k, v in values.items()]
        return {"config": str(values), "settings": rows}

    source, out = write(tmp_path, *LINES), tmp_path / "out"
    run(source, out, engine=engine(pages=9, max_num_seqs=4, sampler="stable"))
    with pytest.raises(ConfigError) as caught:
        run(source, out, engine=engine(pages=9, max_num_seqs=8, overlap=True))
    assert caught.value.what.endswith(
        "what differs: config (engine.max_num_seqs, engine.overlap, engine.sampler)."
    )


def test_settings_that_decide_nothing_more_may_differ(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    assert run(source, out, engine=ENGINE | {"settings": ["elsewhere"]})[1] == 5


def test_another_input_is_refused_and_forced_with_a_record(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    assert ids(out) == ["r2", "r1", "r0"]
    write(tmp_path, line("r0"), line("r1", prompt="new"), line("r2"), line("extra"))
    with pytest.raises(ConfigError, match="what differs: input\\."):
        run(source, out)
    record, asked = run(source, out, engine=ENGINE | {"config": "two"}, resume="force")
    assert asked == 2
    assert sorted(ids(out)) == ["extra", "r0", "r1", "r2"]
    (found,) = record["breaks"]
    assert (found["differ"], found["kept"], found["removed"]) == (["config", "input"], 2, 1)
    assert found["was"]["input"].startswith("sha256:")
    assert run(source, out, engine=ENGINE | {"config": "two"})[0]["breaks"] == [found]


def test_a_forced_run_that_was_killed_before_it_removed_lines_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    write(tmp_path, *LINES[1:])
    with monkeypatch.context() as patch:
        patch.setattr(result_file.ResultFile, "rewrite", lambda self, keys: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(source, out, resume="force")
    assert sorted(ids(out)) == ["r0", "r1", "r2"]
    record, asked = run(source, out)
    assert asked == 5
    assert sorted(ids(out)) == [f"r{i}" for i in range(1, 8)]
    assert len(record["breaks"]) == 1


def test_force_without_a_difference_is_no_break(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    assert run(source, out, resume="force")[0]["breaks"] == []


def test_never_refuses_results_that_are_there(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    run(source, out, resume="never")
    with pytest.raises(ConfigError, match="holds 8 results of an earlier run"):
        run(source, out, resume="never")


def test_results_without_a_record_are_refused(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    (out / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="what differs: run.json"):
        run(source, out)
    record, _ = run(source, out, resume="force")
    assert record["breaks"][0]["differ"] == ["run.json"]


def test_results_of_other_lines_in_the_same_run_are_refused(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    path = out / "results.jsonl"
    strange = json.loads(path.read_text().splitlines()[0]) | {"id": "batch_req_x"}
    path.write_text(path.read_text() + json.dumps(strange) + "\n")
    with pytest.raises(ConfigError, match="what differs: results.jsonl"):
        run(source, out)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda lines: [b"{}\n", *lines], "Line 1 of .* is no result line"),
        (lambda lines: [b"{\n", *lines], "Line 1 of .* is no result line"),
        (lambda lines: [*lines, b'{"request_id": "0"}\n'], "Line 4 of .* is no result line"),
        (lambda lines: [*lines, lines[1]], "Line 4 of .* repeats an earlier one"),
    ],
)
def test_a_damaged_file_is_refused_as_it_is(tmp_path: Path, spoil: Any, words: str):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    stopped(source, out, 3)
    path = out / "results.jsonl"
    path.write_bytes(b"".join(spoil(path.read_bytes().splitlines(keepends=True))))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=words):
        run(source, out)
    assert path.read_bytes() == before


def test_ordered_results_stand_in_the_order_of_the_input(tmp_path: Path):
    source, out = write(tmp_path, *LINES, b"{"), tmp_path / "out"
    run(source, tmp_path / "plain")
    assert ids(tmp_path / "plain")[:2] == [None, "r2"]
    stopped(source, out, 5)
    record, asked = run(source, out, ordered=True)
    assert asked == 4
    assert ids(out) == [*(f"r{i}" for i in range(8)), None]
    assert record["requests"]["count"] == 9
    assert names(out) == ["errors.jsonl", "results.jsonl", "run.json"]
    run(source, tmp_path / "plain", ordered=True)
    assert ids(tmp_path / "plain") == ids(out)


def test_two_runs_never_write_one_folder(tmp_path: Path):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    with (
        Journal(out, read_batch(source, SERVED), ENGINE),
        pytest.raises(ConfigError, match="is being written by another run"),
    ):
        Journal(out, read_batch(source, SERVED), ENGINE)
    assert run(source, out)[1] == 8


@pytest.mark.parametrize("name", ["results.jsonl", "errors.jsonl", "run.json", "metrics.jsonl"])
def test_an_input_is_never_overwritten(tmp_path: Path, name: str):
    source = write(tmp_path, *LINES).rename(tmp_path / name)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match=f"is the output's {name}"):
        run(source, tmp_path)
    assert source.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    source = write(tmp_path, *LINES)
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        run(source, source / "out")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, out = write(tmp_path, *LINES), tmp_path / "out"
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        return real(file, data[:50] if len(calls) == 4 else data)

    with monkeypatch.context() as patch:
        patch.setattr(result_file.os, "write", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            run(source, out)
    assert len(ids(out)) == 3
    assert run(source, out)[1] == 5
    assert sorted(ids(out)) == [f"r{i}" for i in range(8)]


def test_killed_at_any_point_no_line_is_lost_or_doubled(tmp_path: Path):
    source, out = write(tmp_path, *(line(f"r{i}") for i in range(200)), b"{"), tmp_path / "out"
    whole, _ = run(source, tmp_path / "whole")
    command = [sys.executable, slow_run.__file__, str(source), str(out)]
    path, kills, held, rng = out / "results.jsonl", 0, 0, random.Random(1)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    while True:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        target = held + 40
        while process.poll() is None and kills < 3:
            if path.exists() and path.read_bytes().count(b"\n") >= target:
                time.sleep(rng.random() / 100)
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        told, _ = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        found = path.read_bytes().count(b"\n")
        assert found >= target > held
        held = found
        # What a kill in the middle of a write leaves, whether or not this one did.
        with path.open("ab") as file:
            file.write(b'{"id": "batch_req_')
    assert kills == 3
    assert int(told) == 201 - held, "only what was not finished is asked again"
    assert sorted(map(str, ids(out))) == sorted(["None", *(f"r{i}" for i in range(200))])
    record = json.loads((out / "run.json").read_text())
    assert record["finished"] is True
    assert record["requests"] == whole["requests"]
