"""Text completions: prompts in every form, choices, and log-probs as lists."""

import dataclasses
from typing import Any

import pytest
from protocol.fake_engine import SERVED, FakeEngine, output_of, sample_of

from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.protocol import completions
from deepinfer_jax.protocol.ask import Stamp
from deepinfer_jax.protocol.response import error_response, failure
from deepinfer_jax.text.tokenizer import Tokenizer


def parse(**members: Any):
    return completions.parse({"model": "MODEL", "prompt": "ab"} | members, SERVED)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("ab", ["ab"]),
        ("", [""]),
        (["ab", "cd"], ["ab", "cd"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["ab", [3]], ["ab", (3,)]),
    ],
)
def test_prompts_are_texts_or_ids(prompt: Any, asked: list[Any]):
    assert [ask.prompt for ask in parse(prompt=prompt).asks] == asked


@pytest.mark.parametrize("prompt", [[], {}, 5, [1, "a"], [True], [[1, True]], None])
def test_other_prompts_are_refused(prompt: Any):
    with pytest.raises(RequestError, match="prompt"):
        parse(prompt=prompt)


def test_defaults_are_those_of_the_protocol():
    (ask,) = parse().asks
    params = ask.params
    assert (params.max_tokens, params.temperature, params.top_p, params.n) == (16, 1.0, 1.0, 1)
    assert params.logprobs is None and params.seq_seed is None and not ask.open_ended


def test_members_reach_the_parameters():
    members = {"max_tokens": 5, "temperature": 0, "top_p": 0.5, "stop": ["x"], "seed": 9}
    (ask,) = parse(**members, n=2, best_of=2, logprobs=3, echo=False, suffix="").asks
    params = ask.params
    assert (params.max_tokens, params.temperature, params.top_p) == (5, 0.0, 0.5)
    assert (params.stop, params.seq_seed, params.n, params.logprobs) == (("x",), 9, 2, 3)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"echo": True}, "echo is true."),
        ({"suffix": "x"}, 'suffix is "x".'),
        ({"best_of": 3}, "best_of is 3 and n is 1."),
        ({"logprobs": 21}, "logprobs is 21."),
        ({"messages": []}, "'messages', which is not known."),
        ({"max_tokens": 0}, "max_tokens is 0."),
    ],
)
def test_what_is_not_served_is_refused_by_name(members: dict[str, Any], words: str):
    with pytest.raises(RequestError) as caught:
        parse(**members)
    assert words in str(caught.value)


def test_choices_are_the_samples_of_all_prompts_in_order():
    engine = FakeEngine()
    request = parse(prompt=["abc", "de"], n=2)
    outputs = [output for _, output in sorted(engine.answer(request.asks), key=lambda p: p[0])]
    body = completions.respond(request, outputs, engine.tokenizer, Stamp("cmpl-1", 5, "fp"))
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        *((0, "cba"), (1, "cba"), (2, "ed"), (3, "ed"))
    ]
    assert {c["finish_reason"] for c in body["choices"]} == {"stop"}
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 5, "MODEL")
    # BOS and the letters of both prompts; the letters of four answers, without their ends.
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 7, "completion_tokens": 10}
    assert "completion_tokens_details" not in body["usage"]


def test_log_probs_are_lists_by_token(tiny: Tokenizer):
    ids = tiny.encode("é b", add_bos=False)
    sample = sample_of(ids, tiny, top=2, end=[tiny.eos_id])
    body = completions.respond(parse(logprobs=2), [output_of(sample)], tiny, Stamp("i", 1))
    found = body["choices"][0]["logprobs"]
    assert found["tokens"] == ["\\xc3", "\\xa9", " ", "b"]
    assert found["token_logprobs"] == [-1, -2, -3, -4]
    assert found["text_offset"] == [0, 0, 1, 2]
    assert found["top_logprobs"][3] == {"b": -4.0, "a": -5.0}


def test_tokens_of_a_stop_string_have_no_log_probs(tiny: Tokenizer):
    ids = tiny.encode("abSTOP", add_bos=False)
    sample = dataclasses.replace(sample_of(ids, tiny, top=0), text="ab", stop_reason="STOP")
    body = completions.respond(parse(logprobs=0), [output_of(sample)], tiny, Stamp("i", 1))
    assert body["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert body["usage"]["completion_tokens"] == 6


def test_a_log_prob_of_minus_infinity_is_a_number(tiny: Tokenizer):
    sample = sample_of(tiny.encode("a", add_bos=False), tiny, top=2)
    assert sample.logprobs is not None
    sample.logprobs.top[0, 1] = float("-inf")
    body = completions.respond(parse(logprobs=2), [output_of(sample)], tiny, Stamp("i", 1))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "`": -9999.0}]


def test_errors_are_the_client_s_or_the_engine_s():
    ours = {"message": "a. b. c.", "type": "internal_error", "param": None}
    assert error_response(DeepInferError("a.", "b.", "c.")) == (
        500,
        {"error": ours | {"code": "internal_error"}},
    )
    status, body = error_response(RequestError("a.", "b.", "c."))
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_an_output_that_was_not_finished_has_no_response_body(tiny: Tokenizer):
    error = RequestError("a.", "b.", "c.")
    fine, aborted = sample_of([5], tiny), sample_of([5], tiny, finish="abort")
    assert failure([output_of(fine)]) is None
    assert failure([output_of(fine), output_of(error=error)]) is error
    assert "ended with 'abort' after 1 tokens." in str(failure([output_of(fine, aborted)]))
