"""Engines that differ from the default one: where tables lie, samplers, and damaged weights."""

import dataclasses

import numpy as np
import pytest
from short_llm import fewer_sizes, largest, letters, open_llm, write_short_model

from deepinfer_jax import SamplingParams
from deepinfer_jax.errors import CheckpointError, LateCompileError, RequestError
from deepinfer_jax.model.engram_hash import engram_hash, hash_rows
from deepinfer_jax.runner.layout import Bucket, Part, ProgramKey
from deepinfer_jax.runner.record import first_difference, read_record
from deepinfer_jax.text.compressed_ids import compressed_token_map

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
IMAGE = 272
# The first token is an image token: it blocks the n-grams of those after it.
FORCED = SamplingParams(
    temperature=0, max_tokens=10, ignore_eos=True, logprobs=0, golden_token_ids=[IMAGE]
)


@pytest.fixture
def variant(tmp_path, compiled):
    def made(*, change=lambda w: None, spoil=lambda w: None, **engine):
        place = write_short_model(tmp_path / "variant", change=change, spoil=spoil)
        return open_llm(place, compiled, **engine)

    return made


def only(outputs):
    (request,) = outputs
    assert request.error is None
    return request.outputs[0]


@pytest.mark.parametrize("place", ["host", "mmap"])
def test_engram_tables_off_the_device_give_the_same_tokens(llm, short_folder, compiled, place):
    expected = only(llm.generate("x" * 70, FORCED))
    apart = open_llm(short_folder, compiled, engram=place)
    assert len(apart.assembled.tables) == 2 and apart.assembled.params.engram_tables == ()
    made = only(apart.generate("x" * 70, FORCED))
    assert made.token_ids == expected.token_ids
    np.testing.assert_allclose(made.logprobs.token, expected.logprobs.token, atol=1e-5)


def test_a_table_row_on_disk_that_is_no_number_fails_only_who_reads_it(llm, variant):
    config, tokens = llm.config, compressed_token_map(llm.tokenizer)
    pad = int(tokens[config.engram_pad_token_id])

    def rows(ids):
        return hash_rows(engram_hash(config), tokens[np.asarray(ids)], pad)[:, 0]

    good, bad = [0, *letters("abc")], [0, *letters("abd")]
    row = next(iter(set(rows(bad)[-1]) - set(rows(good).flat) - set(rows([*good, 80]).flat)))

    def spoil(stored):
        stored["layers.1.engram.embed.scale"].view(np.uint8)[row] = 255

    broken = variant(spoil=spoil, engram="mmap")
    first = SamplingParams(golden_token_ids=[80], max_tokens=1)
    outputs = broken.generate([good, bad, good], first)
    assert [o.error is None for o in outputs] == [True, False, True]
    assert isinstance(outputs[1].error, CheckpointError)
    assert "layers.1.engram.embed.scale" in str(outputs[1].error)
    assert outputs[1].outputs[0].finish_reason == "error"
    # The same row, met while decoding: what was produced before it stays.
    params = SamplingParams(golden_token_ids=letters("d"), max_tokens=3, ignore_eos=True)
    (late,) = broken.generate([[0, *letters("ab")]], params)
    assert isinstance(late.error, CheckpointError) and late.finished
    assert late.outputs[0].token_ids == tuple(letters("d"))
    assert late.outputs[0].finish_reason == "error"


def poison(weights):
    weights["embed.weight"][letters("Z")] = np.nan


def test_a_row_that_is_not_finite_fails_alone(llm, variant):
    broken = variant(change=poison)
    expected = [o.outputs[0] for o in llm.generate(["abc", "abd"], GREEDY)]
    outputs = broken.generate(["abc", "aZc", "abd", "xxZ"], GREEDY)
    for failed, length in ((outputs[1], 4), (outputs[3], 4)):
        assert isinstance(failed.error, RequestError) and failed.finished
        assert str(failed.error) == (
            f"The logits after token {length} hold NaN or infinity. No token can be drawn from "
            "such a distribution. Check the checkpoint's digest; if it is right, report the prompt."
        )
        assert failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == ()
    for made, alone in zip((outputs[0], outputs[2]), expected, strict=True):
        assert made.error is None and made.outputs[0].token_ids == alone.token_ids
        np.testing.assert_allclose(made.outputs[0].logprobs.token, alone.logprobs.token, atol=1e-5)
    # The slots of the failed ones hold NaN now; their next owners must not see it.
    for _ in range(2):
        again = [o.outputs[0].token_ids for o in broken.generate(["abc", "abd"] * 2, GREEDY)]
        assert again == [e.token_ids for e in expected] * 2


def test_equal_logits_give_the_lowest_id(variant):
    def tie(weights):
        weights["head.weight"][:] = 0

    made = only(variant(change=tie).generate("Hello", GREEDY))
    assert made.token_ids == (0,) * 6
    np.testing.assert_allclose(made.logprobs.token, -np.log(288), rtol=1e-5)


def test_the_original_sampler_repeats_itself_and_agrees_where_nothing_is_random(
    llm, short_folder, compiled
):
    with fewer_sizes(largest):
        original = open_llm(short_folder, compiled, sampler="original")
    assert (
        only(original.generate("Hello", GREEDY)).token_ids
        == only(llm.generate("Hello", GREEDY)).token_ids
    )
    drawn = SamplingParams(seq_seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
    first = only(original.generate("Hello", drawn))
    assert only(original.generate("Hello", drawn)).token_ids == first.token_ids
    other = SamplingParams(seq_seed=6, max_tokens=12, ignore_eos=True)
    assert only(original.generate("Hello", other)).token_ids != first.token_ids
    narrow = SamplingParams(seq_seed=5, max_tokens=6, ignore_eos=True, top_k=1)
    assert (
        only(original.generate("Hello", narrow)).token_ids
        == only(llm.generate("Hello", GREEDY)).token_ids
    )


def test_processed_log_probs_are_those_of_the_distribution_that_was_drawn_from(
    llm, short_folder, compiled
):
    with fewer_sizes(largest):
        processed = open_llm(short_folder, compiled, logprobs_mode="processed")
    params = {"max_tokens": 6, "ignore_eos": True, "logprobs": 4, "seq_seed": 9}
    made = only(processed.generate("Hello", SamplingParams(top_k=3, **params)))
    kept = made.logprobs
    assert kept.mode == "processed"
    np.testing.assert_allclose(np.exp(kept.top[:, :3]).sum(-1), 1, rtol=1e-5)
    assert (kept.top[:, 3] == -np.inf).all()
    for token, logprob, ids, tops in zip(
        made.token_ids, kept.token, kept.top_ids, kept.top, strict=True
    ):
        assert logprob == tops[ids.tolist().index(token)]
    greedy = only(processed.generate("Hello", SamplingParams(temperature=0, **params)))
    assert (greedy.logprobs.token == 0).all()
    raw = only(llm.generate("Hello", SamplingParams(top_k=3, **(params | {"logprobs": 0}))))
    assert raw.token_ids == made.token_ids and (raw.logprobs.token < kept.token).all()


def test_what_is_compiled_is_reported_once(short_folder, compiled):
    calls = []
    llm = open_llm(short_folder, compiled, progress=lambda *call: calls.append(call[0]))
    llm.generate(["Hello", "a"], GREEDY)
    llm.generate(["b", "c"], GREEDY)
    names = [name for name in calls if name.startswith("compiled ")]
    assert names == ["compiled step, 64 rows", "compiled step, 4 rows"]
    assert {"digest", "load"} <= set(calls)
    assert llm.meter.compile_s > 0


def test_a_program_is_lowered_once_and_read_from_its_folder_after_that(
    short_folder, compiled, monkeypatch
):
    first = open_llm(short_folder, compiled)
    first.prepare([5], sequences=2)
    expected = only(first.generate("Hello", GREEDY))
    monkeypatch.setattr("jax.export.export", None)  # lowering again would fail here
    second = open_llm(short_folder, compiled)
    second.prepare([5], sequences=2)
    made = only(second.generate("Hello", GREEDY))
    assert made.token_ids == expected.token_ids
    np.testing.assert_array_equal(made.logprobs.token, expected.logprobs.token)


def test_what_is_prepared_does_not_compile_again(short_folder, compiled):
    calls = []
    llm = open_llm(short_folder, compiled, progress=lambda *call: calls.append(call[0]))
    llm.prepare([5, 70], sequences=1)
    prepared = [name for name in calls if name.startswith("compiled ")]
    assert sorted(prepared) == ["compiled step, 1 rows", "compiled step, 64 rows"]
    llm.generate("x" * 70, GREEDY)
    assert [name for name in calls if name.startswith("compiled ")] == prepared


def test_all_programs_are_compiled_before_the_first_request_and_none_later(short_folder, compiled):
    calls = []
    llm = open_llm(
        short_folder,
        compiled,
        compile="all",
        late_compile="error",
        progress=lambda *call: calls.append(call),
    )
    assert llm.snapshot.compiled == 0
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    expected = only(llm.generate("Hello", short)).token_ids
    names = sorted(name for name, *_ in calls if name.startswith("compiled "))
    assert names == ["compiled step, 1 rows", "compiled step, 4 rows", "compiled step, 64 rows"]
    assert [done for name, done, total in calls if (name, total) == ("compile", 3)] == [1, 2, 3]
    calls.clear()
    llm.generate(["x" * 150, "a", "bc", "de", "f"], short)
    assert (calls, llm.snapshot.compiled, llm.snapshot.late) == ([], 3, 0)

    with pytest.raises(LateCompileError, match="8 top log-probs was not prepared"):
        llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, logprobs=5))
    assert only(llm.generate("Hello", short)).token_ids == expected


def test_the_programs_that_the_first_requests_ask_for_are_among_all(short_folder, compiled):
    llm = open_llm(short_folder, compiled, compile="all", late_compile="error")
    prepared = []
    llm._engine.programs.prepare = lambda wanted: prepared.extend(wanted)  # type: ignore[method-assign]
    asked = [SamplingParams(max_tokens=1, logprobs=n) for n in (None, 5, 0, 6, 1)]
    with pytest.raises(LateCompileError):  # nothing was really compiled
        llm.generate(["a"] * 5, asked)
    rows = [(key.bucket.rows, key.top) for key in prepared]
    assert rows == [(n, t) for t in (0, 1, 8) for n in (1, 4, 64)]


def test_a_late_program_is_never_compiled_in_silence(short_folder, compiled, monkeypatch):
    monkeypatch.setattr("deepinfer_jax.engine.programs.compile_step", lambda *a, **k: None)
    said = "compiled late: step, 1 rows, 1 decoder rows, 1 parts, 14 page updates, 8 top log-probs"
    calls = []
    for progress in (None, lambda what, *_: calls.append(what)):
        how = {"compile": "all", "late_compile": "warn", "progress": progress}
        programs = open_llm(short_folder, compiled, **how)._engine.programs
        programs.prepare([ProgramKey(Bucket(1, 1, 1, 14))])
        programs.seal()
        calls.clear()
        if progress is None:
            with pytest.warns(RuntimeWarning, match=said):
                programs.get(ProgramKey(Bucket(1, 1, 1, 14), 8))
        else:
            programs.get(ProgramKey(Bucket(1, 1, 1, 14), 8))
            assert [text for text in calls if text.startswith(said)] == calls != []


def test_nothing_is_compiled_ahead_where_none_is_asked_for(short_folder, compiled):
    llm = open_llm(short_folder, compiled, compile="none")
    llm.prepare([5, 70], sequences=4)
    assert llm.snapshot.compiled == 0
    only(llm.generate("Hello", GREEDY))
    assert (llm.snapshot.compiled, llm.snapshot.late) == (2, 0)


def test_a_run_can_be_watched_step_by_step(llm):
    seen, start = [], llm.snapshot
    llm.watch(lambda: seen.append(llm.snapshot))
    llm.generate(["x" * 200, "a", "b", "c", "d", "e"], GREEDY)
    llm.watch(None)
    llm.generate("z", GREEDY)
    assert len(seen) >= 200 // 64
    assert seen[0].running + seen[0].waiting == 6
    assert max(s.running for s in seen) == 4
    assert {s.pages_total for s in seen} == {36}
    assert 2 + 3 <= max(s.pages_used for s in seen) <= 36
    assert (seen[-1].running, seen[-1].waiting, seen[-1].pages_used) == (0, 0, 0)
    assert seen[-1].output_tokens - start.output_tokens == 36
    assert seen[-1].prompt_tokens - start.prompt_tokens == 201 + 5 * 2
    assert 0 < seen[-1].wait_s - start.wait_s <= seen[-1].step_s - start.step_s


def test_a_recorded_step_runs_again_to_the_bit(llm, tmp_path):
    recorder = llm.record_steps([2, 5], tmp_path)
    drawn = SamplingParams(max_tokens=8, ignore_eos=True, seq_seed=5, logprobs=0)
    first = only(llm.generate(["x" * 70, "abc"], drawn)[:1]).token_ids
    assert recorder.missing == set()
    for step, rows in ((2, 64), (5, 4)):
        found = read_record(tmp_path / f"step-{step}.npz")
        assert (found.step, found.key.bucket.rows, found.key.top) == (step, rows, 0)
        assert found.about == llm.about_steps()
        assert first_difference(found, llm.replay(found)) is None
        # Another seed draws another token, and another last token writes another cache.
        inputs = {name: array.copy() for name, array in found.inputs.items()}
        _, parts, *_ = found.key.bucket.split(inputs["ints"])
        parts[:, Part.SEED_LOW] ^= 1
        differs = first_difference(found, llm.replay(dataclasses.replace(found, inputs=inputs)))
        assert differs is not None and differs.leaf == "outputs.draw.token"
        state = {name: array.copy() for name, array in found.state.items()}
        state["cache.window"][0] += 1
        other = llm.replay(dataclasses.replace(found, state=state))
        assert found.after is not None and other.after is not None
        assert other.after["cache.window"] != found.after["cache.window"]
    # Recording has changed nothing, and neither has replaying.
    llm._engine.recorder = None
    assert only(llm.generate(["x" * 70, "abc"], drawn)[:1]).token_ids == first
