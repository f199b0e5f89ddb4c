"""The line a second, on a clock that the test turns."""

import io
import json
from dataclasses import fields, replace

import pytest
from rich.console import Console

from deepinfer_jax.engine.acceptance import Acceptance
from deepinfer_jax.engine.meter import Snapshot
from deepinfer_jax.entrypoints import progress, watch
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.entrypoints.watch import Requests, watching
from deepinfer_jax.errors import ConfigError

IDLE = replace(Snapshot(*[0] * len(fields(Snapshot))), acceptance=Acceptance.empty(0))


class Engine:
    """Whose steps the test makes."""

    def __init__(self):
        self.snapshot = replace(IDLE, output_tokens=1000, pages_total=40)
        self.callback = None

    def watch(self, callback):
        self.callback = callback

    def step(self, **changes):
        now = self.snapshot
        self.snapshot = replace(now, steps=now.steps + 1, **changes)
        if self.callback is not None:
            self.callback()


@pytest.fixture
def clock(monkeypatch):
    """The seconds that have passed, as a list of one."""
    now = [100.0]
    for module in (progress, watch):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch.time, "time", lambda: 1700000000.0 + now[0])
    return now


def lines(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_line_is_written_after_the_first_step_of_each_second(tmp_path, clock):
    engine, requests, path = Engine(), Requests(9, 2, 1), tmp_path / "metrics.jsonl"
    with watching(engine, requests, phase="answering", metrics=path):
        for at, tokens in ((100.4, 1010), (101.0, 1020), (101.9, 1030), (104.0, 1100)):
            clock[0] = at
            requests.done += 1
            engine.step(output_tokens=tokens, running=2, waiting=1)
        # A kill here leaves what is there now.
        assert [line["seconds"] for line in lines(path)] == [1.0, 4.0]
        clock[0] = 104.5
        engine.step(output_tokens=1110, running=0, waiting=0)
    assert engine.callback is None
    found = lines(path)
    assert [line["time"] for line in found] == [1700000101.0, 1700000104.0, 1700000104.5]
    assert [line["done"] for line in found] == [4, 6, 6]
    assert {(line["requests"], line["failed"]) for line in found} == {(9, 1)}
    assert [line["output_tokens"] for line in found] == [20, 100, 110]
    assert [line["output_tokens_per_s"] for line in found] == [20.0, 26.7, 20.0]
    assert [line["steps"] for line in found] == [2, 4, 5]
    assert [line["running"] for line in found] == [2, 2, 0]


def test_what_ends_a_run_early_still_leaves_its_last_line(tmp_path, clock):
    engine, path = Engine(), tmp_path / "metrics.jsonl"
    with (
        pytest.raises(KeyboardInterrupt),
        watching(engine, Requests(1), phase="answering", metrics=path),
    ):
        engine.step(output_tokens=1001)
        raise KeyboardInterrupt
    assert [line["output_tokens"] for line in lines(path)] == [1]
    assert engine.callback is None


def test_the_live_line_says_who_runs_what_is_held_how_fast_and_how_long(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=150, color_system=None)
    engine, requests = Engine(), Requests(40, done=10)
    with Live(console=console) as live, watching(engine, requests, phase="answering", live=live):

        def detail():
            (task,) = live._progress.tasks
            return task.fields["detail"]

        assert detail() == "10 of 40 requests"
        clock[0] = 110.0
        requests.done, requests.failed = 14, 1
        engine.step(output_tokens=2000, running=4, waiting=21, pages_used=12)
        # Five of the thirty that were left took ten seconds.
        assert detail() == (
            "15 of 40 requests, 4 running, 21 waiting, 12 of 40 pages, 100 tokens/s, 0:50 left"
        )


def test_without_a_file_nothing_is_written(tmp_path, clock, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = Engine()
    with watching(engine, Requests(1), phase="computing"):
        clock[0] = 200.0
        engine.step()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    engine = Engine()
    with pytest.raises(ConfigError), watching(engine, Requests(1), phase="x", metrics=tmp_path):
        pytest.fail("it runs")
    assert engine.callback is None


def test_what_bounded_replay_saved_is_said_at_the_end_and_only_then(clock):
    engine, notes = Engine(), []
    live = Live(quiet=True)
    live.note = notes.append  # type: ignore[method-assign]
    with watching(engine, Requests(1), phase="answering", live=live):
        engine.step(skipped_rows=1500, skipped_flops=2_500_000_000)
        assert notes == []
    assert notes == [
        "1,500 prompt tokens left out the decoder's layers: 2.5e+09 operations on weights saved"
    ]
    with watching(engine, Requests(1), phase="answering", live=live):
        engine.step()
    assert len(notes) == 1


def counted(*steps):
    made = Acceptance.empty(2)
    for offered, accepted in steps:
        made.count(offered, accepted)
    return made


def test_drafts_by_place_stand_in_the_file_and_in_what_is_said_at_the_end(tmp_path, clock):
    engine, notes, path = Engine(), [], tmp_path / "metrics.jsonl"
    before = counted(*[(2, 0)] * 3)
    engine.snapshot = replace(engine.snapshot, acceptance=before)
    live = Live(quiet=True)
    live.note = notes.append  # type: ignore[method-assign]
    made = [(2, 2)] * 1500 + [(2, 1)] * 500 + [(1, 0)] * 500
    with watching(engine, Requests(1), phase="x", live=live, metrics=path) as watch:
        assert watch.drafts is None
        engine.step(acceptance=counted(*[(2, 0)] * 3, *made))
    (line,) = lines(path)
    assert (line["verify_steps"], line["offered_by_place"]) == (2500, [2500, 2000])
    assert (line["reached_by_place"], line["kept_by_place"]) == ([2500, 2000], [2000, 1500])
    assert (line["kept_of_reached"], line["tokens_per_step"]) == ([0.8, 0.75], 2.4)
    assert watch.drafts == {name: line[name] for name in watch.drafts}
    assert notes == [
        "3,500 of 4,500 drafts kept: 2.40 tokens a step of a sequence, 1.80 drafts verified\n"
        "  place                  1       2\n"
        "  verified           2,500   2,000\n"
        "  kept               2,000   1,500\n"
        "  of those reached  80.0 %  75.0 %"
    ]


def test_what_drafts_brought_is_said_even_where_no_line_is_renewed(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=150, color_system=None)
    engine = Engine()
    engine.snapshot = replace(engine.snapshot, acceptance=counted())
    with (
        Live(console=console) as live,
        watching(engine, Requests(1), phase="x", live=live, renewed=False),
    ):
        engine.step(acceptance=counted((2, 1)))
        assert console.file.getvalue() == ""
    said = console.file.getvalue()
    assert said.startswith("1 of 2 drafts kept: 2.00 tokens a step of a sequence")
    assert "100.0 %    0.0 %" in said
