"""Log-probs of prompts and scores of continuations, against the same tokens forced one by one."""

import dataclasses

import numpy as np
import pytest
from short_engine import LIMITS
from short_llm import letters, open_llm, write_short_model

from deepinfer_jax import RequestOutput, SamplingParams
from deepinfer_jax.engine.engine import Engine
from deepinfer_jax.engine.sequence import PromptLogprobs, Sequence
from deepinfer_jax.errors import RequestError
from deepinfer_jax.runner.step import StepOptions
from deepinfer_jax.text.output import PlainText
from deepinfer_jax.text.spellings import BOS

# Of one chunk, of several, and of one token; no chunk is so short that it has a program of its own.
IDS = np.random.default_rng(3).integers(3, 250, 150).tolist()
PROMPTS = [IDS, IDS[:40], IDS[60:130], IDS[5:90], IDS[:64], IDS[100:]]
ASKED = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
SCORED = SamplingParams(prompt_logprobs=0, **ASKED)


@pytest.fixture(scope="module")
def forced(llm):
    """The log-probs of tokens that are forced after a context, float32 [c]."""

    def logprobs(context, tokens):
        params = SamplingParams(
            temperature=0, max_tokens=len(tokens), golden_token_ids=tokens, logprobs=0
        )
        (output,) = llm.generate([list(context)], params)
        assert output.error is None
        return output.outputs[0].logprobs.token

    return logprobs


@pytest.fixture(scope="module")
def reference(forced):
    """Of every token of IDS but the first, given all tokens before it."""
    return forced(IDS[:1], IDS[1:])


def only(outputs):
    (output,) = outputs
    assert output.error is None and output.finished
    return output


def test_a_prompt_in_chunks_has_the_log_probs_of_its_tokens_forced_one_by_one(llm, reference):
    params = SamplingParams(prompt_logprobs=3, **ASKED)
    output = only(llm.generate([IDS], params))
    found = output.prompt_logprobs
    assert found.mode == "raw" and found.token.dtype == np.float32
    assert found.token.shape == (149,) and found.top.shape == found.top_ids.shape == (149, 3)
    np.testing.assert_allclose(found.token, reference, atol=1e-5)
    assert (np.diff(found.top, axis=1) <= 0).all() and (found.top[:, 0] >= found.token).all()
    at_top = found.top_ids == np.asarray(IDS[1:])[:, None]
    np.testing.assert_array_equal(found.top[at_top], found.token[at_top.any(1)])
    parts = list(llm.stream([IDS], params))
    assert [p.prompt_logprobs is not None for p in parts] == [True, False]
    np.testing.assert_array_equal(RequestOutput.join(parts).prompt_logprobs.token, found.token)


def test_scored_prompts_among_others_have_the_values_of_a_lone_one(llm):
    params = [SCORED if i % 2 == 0 else SamplingParams(**ASKED) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    for place, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        expected = only(llm.generate([prompt], SCORED))
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        if place % 2:
            assert output.prompt_logprobs is None
        else:
            made = output.prompt_logprobs.token
            assert len(made) == len(prompt) - 1
            np.testing.assert_allclose(made, expected.prompt_logprobs.token, atol=1e-5)


def test_samples_of_a_prompt_share_its_log_probs(llm, reference):
    params = dataclasses.replace(SCORED, n=3, temperature=1.0, seq_seed=4)
    output = only(llm.generate([IDS[:40]], params))
    assert len(output.outputs) == 3
    np.testing.assert_allclose(output.prompt_logprobs.token, reference[:39], atol=1e-5)


def test_a_prompt_of_one_token_has_no_log_probs_and_says_so(llm):
    found = only(llm.generate([[7]], SCORED)).prompt_logprobs
    assert found.token.shape == (0,) and found.top.shape == (0, 0)


@pytest.fixture(scope="module")
def sequence_of(llm):
    def made(prompt, **params):
        return Sequence(
            request=0,
            index=0,
            prompt=np.asarray(prompt, np.int32),
            params=SamplingParams(**(ASKED | params)),
            seed=1,
            text=PlainText(llm.tokenizer, ()),
        )

    return made


def test_a_sequence_that_gives_up_its_pages_keeps_its_scores(llm, sequence_of, reference):
    engine = llm._engine
    taken = engine.pool.allocate(engine.pool.allocatable - 3)  # three pages are left for all
    sequences = [sequence_of(IDS[:120], prompt_logprobs=0, max_tokens=30) for _ in range(3)]
    list(engine.run(sequences))
    engine.pool.release(taken, 0)
    assert engine.meter.preempted
    for sequence in sequences:
        assert len(sequence.output) == 30
        found = sequence.prompt_logprobs("raw")
        np.testing.assert_allclose(found.token, reference[:119], atol=1e-5)


def test_bounded_replay_leaves_scored_prompts_whole(llm, sequence_of):
    net, truncated = llm.assembled, StepOptions(truncate="compact")
    engine = Engine(net.network, net.params, net.mesh, limits=LIMITS, options=truncated, keep=8)
    engine.add(sequence_of(IDS[:40], prompt_logprobs=0))
    engine.add(sequence_of(IDS[:40]))
    waiting = engine._roster.view(1, 0).waiting
    assert [w.keep for w in sorted(waiting, key=lambda w: w.request)] == [0, 8]


def test_what_a_prompt_has_been_told_is_not_taken_twice_and_what_is_no_prompt_never(sequence_of):
    sequence = sequence_of([5, 6, 7, 8, 9], prompt_logprobs=1)
    assert sequence.reusable == 0

    class Made:
        logprob = -np.arange(10, dtype=np.float32)
        greedy = np.zeros(10, bool)
        top_ids = np.arange(20, dtype=np.int32).reshape(10, 2)
        top_logprobs = -np.arange(20, dtype=np.float32).reshape(10, 2)

    scores: PromptLogprobs = sequence.scores
    scores.put(0, Made, slice(2, 4))
    assert sequence.reusable == 2 and sequence.prompt_logprobs("raw") is None
    scores.put(0, Made, slice(5, 10))  # run again, outputs behind it
    found = sequence.prompt_logprobs("raw")
    assert found.token.tolist() == [-2, -3, -7, -8]
    assert found.top_ids.tolist() == [[4], [6], [14], [16]]
    assert sequence.reusable == 5


def test_a_score_is_the_sum_of_the_log_probs_of_the_forced_tokens(llm, forced):
    pairs = [(IDS[:30], IDS[30:37]), (IDS[:100], IDS[100:101]), (IDS[:3], IDS[3:90])]
    for (context, tokens), score in zip(pairs, llm.score(pairs), strict=True):
        expected = forced(context, tokens)
        assert score.error is None
        assert score.context_token_ids == tuple(context) and score.token_ids == tuple(tokens)
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-5)
        np.testing.assert_allclose(score.logprob_sum, expected.sum(dtype=np.float64), atol=1e-4)


@pytest.mark.parametrize("count", [1, 4, 5, 31])
def test_a_score_does_not_depend_on_how_many_pairs_stand_beside_it(llm, count):
    pair, longer = (IDS[:30], IDS[30:37]), (IDS[:70], IDS[70:140])
    (alone,) = llm.score([pair])
    for score in llm.score([pair] * count + [longer])[:-1]:
        np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-5)
        assert score.is_greedy == alone.is_greedy


def test_greedy_is_what_a_greedy_generation_writes(llm):
    context = IDS[5:25]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    written = only(llm.generate([context], params)).outputs[0].token_ids
    changed = [(*written[:i], (written[i] + 1) % 250, *written[i + 1 :]) for i in range(6)]
    scores = llm.score([(context, written[:n]) for n in range(1, 7)])
    assert [s.is_greedy for s in scores] == [True] * 6
    assert not any(s.is_greedy for s in llm.score([(context, tokens) for tokens in changed]))


def test_texts_are_encoded_together_behind_one_bos(llm):
    bos, text = llm.tokenizer.bos_id, "Hello there"
    pairs = [("Hello ", "there"), (BOS + "Hello", " there"), ("", text), ([], letters(text))]
    first, again, whole, ids = llm.score(pairs)
    assert first.context_token_ids == (bos, *letters("Hello"))
    assert first.token_ids == tuple(letters(" there"))
    assert again.context_token_ids == first.context_token_ids
    assert again.logprob_sum == first.logprob_sum
    assert whole.context_token_ids == ids.context_token_ids == (bos,)
    assert whole.token_ids == ids.token_ids == tuple(letters(text))
    np.testing.assert_allclose(whole.logprob_sum, ids.logprob_sum, atol=1e-5)
    (spelled,) = llm.score([("", BOS)])
    assert bos not in spelled.token_ids and llm.tokenizer.decode(spelled.token_ids) == BOS


def test_an_empty_continuation_is_certain(llm):
    (score,) = llm.score([("Hello", "")])
    assert (score.logprob_sum, score.is_greedy, score.token_ids) == (0.0, True, ())
    assert score.error is None and score.logprobs.shape == (0,)


BAD = {
    "no pair": ("Hello", "Pair 1 is a str of 5. What is scored is a continuation after a context."),
    "three": (("a", "b", "c"), "Pair 1 is a tuple of 3."),
    "mixed": (("a", [5]), "Pair 1 mixes a text and token ids. Two texts are encoded together"),
    "outside": (([5], [300]), "Request 1 forces token id 300; the vocabulary has 288 ids."),
    "long": (("x" * 1080, "y" * 9), "Request 1: prompt 1089 + max_tokens 1 exceeds max_model_len"),
    "fractions": (([5], [0.5]), "Request 1 has token ids of type float64 and shape [1]."),
}


def test_a_bad_pair_has_its_error_and_the_others_their_scores(llm):
    good = (IDS[:30], IDS[30:37])
    (alone,) = llm.score([good])
    for bad, message in BAD.values():
        first, failed, last = llm.score([good, bad, good])
        assert isinstance(failed.error, RequestError) and message in str(failed.error)
        assert np.isnan(failed.logprob_sum) and not failed.is_greedy
        for score in (first, last):
            np.testing.assert_allclose(score.logprobs, alone.logprobs, atol=1e-5)
    assert llm.score([]) == []


def test_rows_that_are_no_numbers_fail_their_pair_alone(llm, compiled, tmp_path):
    def poison(weights):
        weights["embed.weight"][letters("Z")] = np.nan

    broken = open_llm(write_short_model(tmp_path / "broken", change=poison), compiled)
    good = ("Hello there", " you")
    outputs = broken.score([good, ("Hello Z there", " you"), good])
    assert str(outputs[1].error) == (
        "The logits after token 14 hold NaN or infinity. No token can be drawn from such a "
        "distribution. Check the checkpoint's digest; if it is right, report the prompt."
    )
    assert np.isnan(outputs[1].logprob_sum)
    (expected,) = llm.score([good])
    for score in (outputs[0], outputs[2]):
        np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=1e-5)


def test_processed_log_probs_are_no_scores(short_folder, compiled):
    processed = open_llm(short_folder, compiled, logprobs_mode="processed")
    with pytest.raises(RequestError, match="score was called with engine.logprobs_mode=processed."):
        processed.score([("a", "b")])
