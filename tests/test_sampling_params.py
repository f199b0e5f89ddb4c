import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling_params import ParameterError, SamplingParams, draw_seed, sample_seed


def refusal(**arguments):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**arguments)
    assert all((caught.value.what, caught.value.why, caught.value.do))
    return caught.value


def test_defaults_are_those_of_the_published_interface():
    assert dataclasses.asdict(SamplingParams()) == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 16,
        "n": 1,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "seq_seed": None,
        "so_args": None,
        "golden_token_ids": None,
    }


def test_the_signature_lists_the_fields():
    names = list(inspect.signature(SamplingParams).parameters)
    assert names == [f.name for f in dataclasses.fields(SamplingParams)]


def test_an_unknown_keyword_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError) as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert isinstance(caught.value, ParameterError)
    assert "unknown keyword 'temprature'" in str(caught.value)
    assert str(caught.value).endswith("Did you mean 'temperature'?")


@pytest.mark.parametrize(
    "name",
    ["presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias"],
)
def test_penalties_min_p_and_logit_bias_are_refused_by_name_with_the_reason(name):
    assert str(refusal(**{name: 0})) == (
        f"SamplingParams does not take {name}=0. The distribution is shaped by temperature, "
        f"top_p and top_k alone, served as sent. Leave {name} out."
    )


def test_a_feature_that_is_not_offered_and_another_name_say_so():
    assert "Every sample that is drawn is returned" in str(refusal(best_of=3))
    assert str(refusal(seed=3)) == (
        "SamplingParams does not take seed=3. What it asks for is named seq_seed here. "
        "Use seq_seed."
    )


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"top_logprobs": 5}, 5),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": None, "logprobs": 2}, 2),
        ({"top_logprobs": 5, "logprobs": True}, 5),
        ({"top_logprobs": 5, "logprobs": False}, 5),
        ({"top_logprobs": 0, "logprobs": True}, 1),
        ({"top_logprobs": 3, "logprobs": 3}, 3),
        ({"first_n_token_no_eos": 0, "eos_id": 0}, None),
    ],
)
def test_the_original_engines_keywords_work(arguments, count):
    assert SamplingParams(**arguments) == SamplingParams(logprobs=count)


def test_what_this_version_cannot_do_of_the_originals_keywords_is_refused():
    assert str(refusal(first_n_token_no_eos=1)) == (
        "SamplingParams does not take first_n_token_no_eos=1. Ending early is never suppressed; "
        "ignore_eos=True runs to max_tokens. Leave first_n_token_no_eos out."
    )
    assert "The end-of-sequence token is the tokenizer's" in str(refusal(eos_id=5))
    assert str(refusal(logprobs=2, top_logprobs=3)) == (
        "logprobs=2 and top_logprobs=3 ask for different numbers. Both say how many of the "
        "likeliest tokens are reported beside the token itself. Set one of them."
    )
    assert "top_logprobs=1001 is outside 0..1000." in str(refusal(top_logprobs=1001))
    assert isinstance(refusal(top_logprobs=True), TypeError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": float("nan")}, "temperature=nan cannot divide logits. It must be 0, or"),
        ({"temperature": -0.1}, "temperature=-0.1 cannot divide logits. It must be 0, or from"),
        ({"temperature": float("inf")}, "temperature=inf cannot divide logits. It must be 0"),
        (
            {"temperature": -(10**400)},
            "temperature=-inf cannot divide logits. It must be 0, or from 1.18e-38 to",
        ),
        ({"temperature": 1e-40}, "temperature=1e-40 cannot divide logits. It must be 0, or"),
        ({"top_p": 0}, "top_p=0 is outside (0, 1]. It is the probability that the kept"),
        ({"top_p": 1.01}, "top_p=1.01 is outside (0, 1]. It is the probability"),
        ({"top_p": float("nan")}, "top_p=nan is outside (0, 1]. It is the probability"),
        ({"top_k": -2}, "top_k=-2 is outside -1..2147483647. It is how many tokens may be"),
        ({"max_tokens": 0}, "max_tokens=0 is outside 1..2147483647. A request produces at"),
        ({"n": 0}, "n=0 is outside 1..4096. It is how many samples of one prompt"),
        ({"n": 4097}, "n=4097 is outside 1..4096. It is how many samples of one prompt"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]=-1 is outside 0..2147483647. A token"),
        ({"golden_token_ids": [-5]}, "golden_token_ids[0]=-5 is outside 0..2147483647. A token"),
        ({"stop": ["a", ""]}, "stop[1] is an empty string. It would stop every sequence"),
        ({"logprobs": -1}, "logprobs=-1 is outside 0..1000. logprobs is how many of the"),
        ({"prompt_logprobs": 1001}, "prompt_logprobs=1001 is outside 0..1000. prompt_logprobs is"),
        ({"so_args": {"schema": "a"}}, "so_args has the keys schema. A grammar is described by"),
        (
            {"golden_token_ids": range(20)},
            "golden_token_ids has 20 tokens, max_tokens is 16. The tokens past max_tokens would "
            "never be reached. Set max_tokens to at least 20.",
        ),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_with_its_number(arguments, message):
    assert message in str(refusal(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": None},
        {"top_p": "0.9"},
        {"top_k": 2.0},
        {"max_tokens": None},
        {"max_tokens": True},
        {"n": 1.0},
        {"stop": 3},
        {"stop": ["a", 3]},
        {"stop_token_ids": 3},
        {"stop_token_ids": "12"},
        {"stop_token_ids": [1.5]},
        {"ignore_eos": 1},
        {"logprobs": 1.0},
        {"seq_seed": 1.0},
        {"seq_seed": True},
        {"seq_seed": "7"},
        {"so_args": "regex"},
        {"so_args": {"schema_type": 1, "schema": "a"}},
        {"so_args": {"schema_type": "regex", "schema": 3}},
        {"golden_token_ids": 5},
    ],
)
def test_a_wrong_type_is_a_type_error_that_names_the_field(arguments):
    error = refusal(**arguments)
    assert isinstance(error, TypeError)
    (name,) = arguments
    assert error.what.startswith(name) and "of type" in error.what
    assert error.why.startswith("It must be")


def test_values_are_stored_in_one_form_and_the_callers_objects_stay_as_they_were():
    ids, grammar = [4, 5], {"schema_type": "json", "schema": {"type": "object"}}
    before = copy.deepcopy((ids, grammar))
    params = SamplingParams(
        stop="\n\n",
        stop_token_ids=ids,
        logprobs=True,
        prompt_logprobs=False,
        top_k=0,
        temperature=np.float32(0.5),
        golden_token_ids=np.array([1, 2]),
        so_args=grammar,
        seq_seed=-1,
    )
    assert params.stop == ("\n\n",)
    assert params.stop_token_ids == (4, 5)
    assert params.logprobs == 1 and type(params.logprobs) is int
    assert params.prompt_logprobs is None
    assert type(params.temperature) is float
    assert params.golden_token_ids == (1, 2)
    assert params.seq_seed == 2**64 - 1
    assert (ids, grammar) == before
    grammar["schema"]["type"] = "array"
    assert params.so_args == before[1]


def test_parameters_are_frozen_hashable_and_survive_copies():
    params = SamplingParams(temperature=0.3, so_args={"schema_type": "regex", "schema": "a"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert len({params, dataclasses.replace(params)}) == 1
    assert dataclasses.replace(params, n=2).n == 2
    assert "min_p" in str(pickle.loads(pickle.dumps(refusal(min_p=0.1))))


def test_the_first_sample_keeps_the_seed_and_the_others_differ():
    assert sample_seed(17, 0) == 17
    seeds = [sample_seed(s, i) for s in (0, 1, 17) for i in range(100)]
    assert len(set(seeds)) == 300
    assert all(0 <= s < 2**64 for s in seeds)
    assert sample_seed(17, 3) == sample_seed(17, 3)


def test_derived_seeds_are_the_published_splitmix64_outputs():
    assert [sample_seed(1234567, i) for i in (1, 2, 3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_drawn_seeds_are_64_bits_and_fresh():
    seeds = {draw_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert 2**58 < max(seeds) < 2**64
