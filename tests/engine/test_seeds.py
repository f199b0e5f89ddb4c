"""Requests with a seed and without one, side by side, under both samplers."""

import pytest
from bitwise import assert_same_bits
from short_llm import letters, open_llm, shorter_config, write_short_model

from deepinfer_jax import SamplingParams
from deepinfer_jax.engine import admission
from deepinfer_jax.sampling_params import draw_seed, sample_seed

PROMPTS = [letters(text) for text in ("The", "abc", "The", "abc", "The")]


@pytest.fixture(scope="module", params=["stable", "original"])
def llm(request, tmp_path_factory, compiled):
    folder = write_short_model(tmp_path_factory.mktemp("model") / "shorter", shorter_config())
    engine = {"sampler": request.param, "batch_invariant": True, "max_num_batched_tokens": 4}
    return open_llm(folder, compiled, **engine)


def params(seed, n=1):
    return SamplingParams(
        seq_seed=seed, n=n, max_tokens=8, ignore_eos=True, logprobs=0, temperature=0.9, top_p=0.9
    )


@pytest.fixture
def drawn(monkeypatch):
    """The seeds that were drawn from the operating system, in order."""
    seeds = []

    def counted():
        seeds.append(draw_seed())
        return seeds[-1]

    monkeypatch.setattr(admission, "draw_seed", counted)
    return seeds


def test_a_row_with_a_seed_and_one_without_share_a_batch_and_nothing_else(llm, drawn):
    asked = [params(7), params(None), params(7), params(None), params(None, n=2)]
    made = llm.generate(None, asked, PROMPTS)
    assert not [output.error for output in made if output.error]
    # One seed is drawn for each request without one, however many samples it has.
    assert len(drawn) == 3
    expected = [[7], [drawn[0]], [7], [drawn[1]], [sample_seed(drawn[2], i) for i in (0, 1)]]
    assert [[sample.seq_seed for sample in output.outputs] for output in made] == expected
    samples = [sample for output in made for sample in output.outputs]
    assert samples[0].token_ids == samples[2].token_ids
    assert len({sample.token_ids for sample in samples}) == len(samples) - 1
    prompts = [*PROMPTS, PROMPTS[-1]]
    for sample, prompt in zip(samples, prompts, strict=True):
        (alone,) = llm.generate(None, params(sample.seq_seed), [prompt])
        (again,) = alone.outputs
        assert (again.token_ids, again.seq_seed) == (sample.token_ids, sample.seq_seed)
        assert_same_bits(again.logprobs.token, sample.logprobs.token)
    assert len(drawn) == 3
