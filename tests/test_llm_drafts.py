"""Drafting by a network's own drafter, through `LLM`: the tokens are those without drafts."""

import numpy as np
import pytest
from draft_engine import committed, state_of
from short_llm import (
    fewer_sizes,
    largest,
    of_all_slots,
    open_llm,
    shorter_config,
    write_short_model,
)

from deepinfer_jax import SamplingParams

EVERY = tuple  # all sizes that are planned
PROMPTS = [[3 + (7 * i + j) % 250 for j in range(20 + 30 * i)] for i in range(5)]
TEMPERATURES = (0.0, 0.3, 0.8, 1.2, 0.0)
PARAMS = [
    SamplingParams(temperature=t, max_tokens=60, ignore_eos=True, seq_seed=5, top_p=p)
    for t, p in zip(TEMPERATURES, (1.0, 1.0, 0.9, 1.0, 1.0), strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("drafter") / "model"
    return write_short_model(made, shorter_config(), drafter=True)


@pytest.fixture(scope="module")
def opened(folder, compiled):
    """Opens an engine, by default with steps of one size, so that one program serves all."""

    def opened(*, sizes=largest, **engine):
        with fewer_sizes(sizes):
            return open_llm(folder, compiled, late_compile="warn", **engine)

    return opened


@pytest.fixture(scope="module")
def write(opened):
    def written(**engine):
        llm = opened(**engine)
        return llm, llm.generate(None, PARAMS, PROMPTS)

    return written


@pytest.fixture(scope="module")
def expected(write):
    _, outputs = write(nextn=0, sizes=EVERY)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "engine",
    [
        {"nextn": 5, "sizes": EVERY},
        {"nextn": 2, "overlap": False},
        {"nextn": 5, "sizes": of_all_slots, "varlen": True},
    ],
    ids=["5", "2, plain", "5, varlen"],
)
def test_coupled_drafts_change_no_token_at_any_temperature(write, expected, engine):
    llm, outputs = write(**engine)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    drafted = sum(output.outputs[0].drafted for output in outputs)
    accepted = sum(output.outputs[0].accepted for output in outputs)
    assert (drafted, accepted) == (llm.meter.drafted, llm.meter.accepted)
    # Lengths follow what steps take, and then drafts of so small a network may not pay at all.
    assert drafted > accepted > 0 or llm._engine.measured
    assert llm._engine.measured == engine.get("varlen", False)


def test_a_run_counts_its_drafts_by_place(write):
    llm, outputs = write(nextn=5, sizes=EVERY)
    found = llm.snapshot.acceptance
    drafted = sum(output.outputs[0].drafted for output in outputs)
    assert (found.offered.sum(), found.kept.sum()) == (drafted, llm.meter.accepted)
    assert (np.diff(found.offered) <= 0).all() and (np.diff(found.kept) <= 0).all()
    assert (found.kept <= found.reached).all() and (found.reached <= found.offered).all()
    assert found.kept[0] > 0 and found.reached[1] <= found.kept[0]


def test_a_drafter_that_goes_wrong_is_told_of_once_during_a_run(opened):
    said, calls = "Draft 2 is kept in 0.", []
    for progress in (None, lambda what, *_: calls.append(what)):
        llm = opened(nextn=5, sizes=EVERY, progress=progress)
        counts = llm._engine.acceptance
        counts.on_alarm, tell = None, counts.on_alarm
        for _ in range(9995):  # as if all later places had been wrong for long
            counts.count(5, 1)
        counts.on_alarm = tell
        calls.clear()
        if progress is None:
            with pytest.warns(RuntimeWarning, match=said):
                llm.generate(None, PARAMS[:1], PROMPTS[:1])
        else:
            llm.generate(None, PARAMS[:1] * 4, PROMPTS[:1] * 4)
            assert len([text for text in calls if text.startswith(f"alarm: {said}")]) == 1


@pytest.mark.parametrize("engine", [{"verification": "rejection"}, {"sampler": "original"}])
def test_rules_that_compare_laws_write_as_many_tokens_and_greedy_ones_alike(
    write, expected, engine
):
    llm, outputs = write(nextn=5, **engine)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert [len(t) for t in tokens] == [60] * 5
    assert (tokens[0], tokens[4]) == (expected[0], expected[4])
    assert llm.meter.accepted > 0


def test_what_drafts_write_can_be_scored_as_well_as_what_is_drawn(opened, expected):
    llm = opened(nextn=5)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    with_drafts = llm.generate(None, [params], [PROMPTS[0]])[0].outputs[0]
    bare = opened(nextn=0)
    without = bare.generate(None, [params], [PROMPTS[0]])[0].outputs[0]
    assert with_drafts.token_ids == without.token_ids == expected[0][:30]
    np.testing.assert_allclose(with_drafts.logprobs.token, without.logprobs.token, atol=1e-4)
    assert with_drafts.logprobs.top_ids.tolist() == without.logprobs.top_ids.tolist()


def rings(llm):
    """Positions of a window ring, of a draft ring if there is one, and of a pair's raw rows."""
    cache = llm._engine.programs.state_shapes.cache
    draft = None if cache.draft is None else cache.draft.shape[2]
    return cache.window.shape[2], draft, cache.sources[0].raw.shape[1]


def test_more_backtracking_is_longer_rings_and_the_same_tokens(opened, expected):
    for nextn, backtracking, kept in ((5, 6, 6), (5, 0, 6), (0, 3, 3), (5, 11, 11)):
        llm = opened(nextn=nextn, max_backtracking_tokens=backtracking)
        window = llm.config.sliding_window + kept
        assert rings(llm) == (window, window if nextn else None, 2 + kept)
        assert (llm.plan().backtrack, llm.plan().drafts) == (kept, nextn)
    # Several times around the ring; the last of the engines has the longest.
    output = llm.generate(None, PARAMS[2:3], PROMPTS[2:3])[0].outputs[0]
    assert output.token_ids == expected[2]
    assert llm.meter.accepted


def test_the_caches_hold_what_plain_decoding_leaves_there(opened):
    made = []
    for drafts in (0, 5):
        llm = opened(nextn=drafts, batch_invariant=True)
        made.append([])
        for tokens in (60, 61, 163):  # odd and even ends, and beyond the length of every ring
            params = SamplingParams(temperature=0.8, max_tokens=tokens, ignore_eos=True, seq_seed=1)
            output = llm.generate(None, [params], [PROMPTS[0]])[0].outputs[0]
            length, digest, _ = committed(llm.config, state_of(llm._engine), 0)
            assert length == len(PROMPTS[0]) + tokens - 1
            made[-1].append((output.token_ids, digest))
    assert made[0] == made[1]
