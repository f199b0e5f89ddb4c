"""Batch-invariant arithmetic through the whole engine: alone and among others, the same bytes."""

from bitwise import assert_same_bits
from short_llm import letters, open_llm, shorter_config, write_short_model

from deepinfer_jax import SamplingParams


def test_a_request_has_the_same_tokens_and_log_prob_bytes_alone_and_among_others(
    tmp_path, compiled
):
    folder = write_short_model(tmp_path / "shorter", shorter_config())
    # Steps of at most 4 rows, so that the programs of 1 and of 4 rows are all there are.
    llm = open_llm(folder, compiled, batch_invariant=True, max_num_batched_tokens=4)
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
