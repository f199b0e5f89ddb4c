"""When programs are compiled, and what becomes of one that is missing after that."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from deepinfer_jax.engine import programs
from deepinfer_jax.engine.programs import Compiled, Late, Programs
from deepinfer_jax.errors import LateCompileError
from deepinfer_jax.runner.layout import Bucket, ProgramKey
from deepinfer_jax.runner.step import StepOptions

SMALL, LARGE = Bucket(1, 1, 1, 2), Bucket(64, 20, 4, 5)
Key = ProgramKey


@pytest.fixture
def made(monkeypatch):
    """Makes `Programs` whose compilations take no time; lists bucket and top of each."""
    compiled, reports = [], []

    def compile_step(network, mesh, arguments, *, bucket, options, kept):
        compiled.append(Key(bucket, options.top, options.prompt))
        if bucket.rows == 13:
            raise RuntimeError("no such program")
        return lambda: Key(bucket, options.top, options.prompt)

    monkeypatch.setattr(programs, "compile_step", compile_step)

    def make(**options):
        nothing = {"network": None, "params": (), "state": (), "mesh": None}
        made = Programs(**nothing, options=StepOptions(), report=reports.append, **options)
        return made, compiled, reports

    return make


def test_what_is_prepared_is_compiled_once_and_reported_with_what_is_left(made):
    found, compiled, reports = made()
    found.prepare([Key(SMALL, 0), Key(LARGE, 0), Key(SMALL, 0)])
    found.prepare([Key(SMALL, 0)])
    assert sorted(compiled) == [Key(SMALL, 0), Key(LARGE, 0)]
    assert [(r.done, r.total, r.late) for r in reports] == [(1, 2, None), (2, 2, None)]
    assert {r.name for r in reports} == {"step, 1 rows", "step, 64 rows"}
    assert found.get(Key(LARGE, 0))() == Key(LARGE, 0)
    assert (found.count, found.late, len(compiled)) == (2, [], 2)


def test_before_the_end_of_warm_up_a_missing_program_is_only_compiled(made):
    found, _, reports = made(late_compile="error")
    assert found.get(Key(SMALL, 4))() == Key(SMALL, 4)
    assert (found.late, reports[0].late, found.sealed) == ([], None, False)


@pytest.mark.parametrize(
    ("bucket", "top", "reason"),
    [
        (LARGE, 0, "no program of this bucket was prepared"),
        (SMALL, 8, "the form with 8 top log-probs was not prepared, only [0, 2]"),
    ],
)
def test_after_it_one_is_compiled_and_said_with_its_shape_and_reason(made, bucket, top, reason):
    found, _, reports = made()
    found.prepare([Key(SMALL, 0), Key(SMALL, 2)])
    found.seal()
    assert found.get(Key(bucket, top))() == Key(bucket, top)
    found.get(Key(bucket, top))
    assert found.late == [Late(Key(bucket, top), reason)]
    shape = f"{bucket.rows} rows, {bucket.decoder_rows} decoder rows, {bucket.parts} parts, "
    said = f"late: step, {shape}{bucket.updates} page updates, {top} top log-probs: {reason}"
    assert [r.name for r in reports[2:]] == [said]


def test_where_that_is_an_error_it_is_refused_and_can_still_be_prepared(made):
    found, compiled, _ = made(late_compile="error")
    found.prepare([Key(SMALL, 0)])
    found.seal()
    with pytest.raises(LateCompileError) as caught:
        found.get(Key(SMALL, 8))
    assert str(caught.value) == (
        "A step of 1 rows, 1 decoder rows, 1 parts, 2 page updates, 8 top log-probs is not among "
        "the 1 programs that were compiled ahead. The reason is that the form with 8 top log-probs "
        "was not prepared, only [0], and engine.late_compile is error. Prepare it before the run "
        "(LLM.prepare), or set engine.late_compile=warn."
    )
    assert compiled == [Key(SMALL, 0)] and found.late == []
    found.prepare([Key(SMALL, 8)])
    assert found.get(Key(SMALL, 8))() == Key(SMALL, 8)


def test_a_program_that_cannot_be_compiled_stops_those_that_have_not_begun(made, monkeypatch):
    stopping = Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            stopping.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(programs.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(programs, "ThreadPoolExecutor", Pool)
    found, compiled, _ = made()
    quick = programs.compile_step

    def compile_step(*arguments, bucket, **options):
        # The one after the bad program has begun already, and goes on until all are stopped.
        assert bucket.rows < 20 or stopping.wait(60)
        return quick(*arguments, bucket=bucket, **options)

    monkeypatch.setattr(programs, "compile_step", compile_step)
    bad = Bucket(13, 13, 1, 2)
    with pytest.raises(RuntimeError, match="no such program"):
        found.prepare(
            [Key(SMALL, 0), Key(bad, 0), *(Key(Bucket(n, n, 1, 2)) for n in range(20, 40))]
        )
    assert len(compiled) <= 3
    assert Key(bad, 0) in compiled and found.get(Key(SMALL, 0))() == Key(SMALL, 0)


def test_a_report_names_a_program_by_its_rows():
    assert Compiled(Key(SMALL), 1.0, 1, 1).name == "step, 1 rows"
