"""Batch-invariant arithmetic through the whole engine: alone and among others, the same bytes."""

import pytest
from bitwise import assert_same_bits
from short_llm import letters, open_llm, shorter_config, write_short_model

from deepinfer_jax import SamplingParams


@pytest.fixture(scope="module")
def invariant(tmp_path_factory, compiled):
    folder = write_short_model(tmp_path_factory.mktemp("model") / "shorter", shorter_config())
    # Small steps, so that the programs of 1, 4 and 5 rows are all there are.
    return open_llm(folder, compiled, batch_invariant=True, max_num_batched_tokens=4)


def test_a_request_has_the_same_tokens_and_log_prob_bytes_alone_and_among_others(invariant):
    llm = invariant
    seeded = SamplingParams(seq_seed=7, max_tokens=9, ignore_eos=True, logprobs=0, top_p=0.9)
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)
    prompt = letters("The quick brown fox jumps")
    others = [letters("abc" * 9), letters("Hello"), letters("x")]
    for params in (seeded, greedy):
        (alone,) = llm.generate(None, params, [prompt])
        *_, among = llm.generate(None, [greedy, seeded, seeded, params], [*others, prompt])
        made, expected = among.outputs[0], alone.outputs[0]
        assert among.error is None and len(made.token_ids) == 9
        assert made.logprobs is not None and expected.logprobs is not None
        assert made.token_ids == expected.token_ids
        assert_same_bits(made.logprobs.token, expected.logprobs.token)


@pytest.mark.parametrize("count", [4, 31])
def test_a_score_has_the_same_bits_whoever_stands_beside_it(invariant, count):
    pair = letters("The quick brown"), letters(" fox")
    longer = letters("abc" * 9), letters("Hello" * 3)
    (alone,) = invariant.score([pair])
    for score in invariant.score([*[pair] * count, longer])[:-1]:
        assert score.error is None and score.is_greedy == alone.is_greedy
        assert_same_bits(score.logprobs, alone.logprobs)
        assert score.logprob_sum == alone.logprob_sum
    forced = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, golden_token_ids=tuple(pair[1])
    )
    (made,) = invariant.generate(None, forced, [pair[0]])
    assert made.outputs[0].logprobs is not None
    assert_same_bits(made.outputs[0].logprobs.token, alone.logprobs)
