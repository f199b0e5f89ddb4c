"""Chat completions: the recorded protocol, what is refused by name, log-probs by token."""

import json
import re
from typing import Any

import pytest
from protocol.fake_engine import SERVED, output_of, sample_of
from text.chat_cases import cases, render_arguments

from deepinfer_jax.errors import RequestError
from deepinfer_jax.protocol import chat_completions
from deepinfer_jax.protocol.ask import Stamp
from deepinfer_jax.protocol.logprobs import attribute
from deepinfer_jax.text.chat import render
from deepinfer_jax.text.events import ParserOptions
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Piece, Tokenizer

RELEASE = {"DeepSeek-V4.1-Flash"}
HI = {"model": "MODEL", "messages": [{"role": "user", "content": "Hi"}]}
SPECIAL = re.compile("(</think>|｜DSML｜)")


def parse(**members: Any):
    return chat_completions.parse(HI | members, SERVED)


def spelled(text: str) -> list[Piece]:
    """Pieces in which the markers are special tokens."""
    return [Piece(part, SPECIAL.fullmatch(part) is not None) for part in SPECIAL.split(text)]


# The engine has no content filter, so that no output of it ends so.
PROTOCOL = [c for c in cases("protocol_chat_completions") if c["name"] != "content_filter"]


@pytest.mark.parametrize("case", PROTOCOL, ids=lambda c: c["name"])
def test_a_recorded_run_gives_its_response_body(case: dict[str, Any], release: Tokenizer):
    request = chat_completions.parse(case["request"], RELEASE)
    (ask,) = request.asks
    parsing = render(ask.messages or (), **ask.options).parsing
    parsing = ParserOptions(**(vars(parsing) | {"stop": tuple(ask.params.stop)}))
    ids = [i for t in case["output_text_chunks"] for i in release.encode_pieces(spelled(t))]
    sample = sample_of(ids, release, parsing, finish=case["backend_finish"])
    made = output_of(sample, prompt=range(10), cached=4)
    body = chat_completions.respond(request, [made], release, Stamp("RID", 1, "fp"))
    expected = case["expected_response"] | {"created": 1, "model": "DeepSeek-V4.1-Flash"}
    calls = body["choices"][0]["message"].get("tool_calls", [])
    for i, call in enumerate(calls):
        assert re.fullmatch(f"call_{i:02}_[0-9A-Za-z]{{24}}", call["id"])
        call["id"] = f"<call_id_{i:02}>"
    assert body == expected


def test_only_the_content_filter_is_left_out_of_the_recorded_runs():
    assert len(PROTOCOL) == len(cases("protocol_chat_completions")) - 1 == 8


def test_the_token_that_ended_the_answer_is_not_counted(tiny: Tokenizer):
    request = parse(thinking={"type": "disabled"})
    ids = tiny.encode("ok", add_bos=False)
    for end, finish in (([tiny.eos_id], "stop"), ([], "length")):
        sample = sample_of(ids, tiny, ParserOptions(), finish=finish, end=end)
        body = chat_completions.respond(request, [output_of(sample)], tiny, Stamp("RID", 1))
        assert body["usage"]["completion_tokens"] == 2
        assert body["choices"][0]["finish_reason"] == finish


RENDERED = [
    c
    for c in cases("render_chat_completions")
    # Grammars are not enforced yet, so both are refused; see below.
    if c["name"] not in ("regex", "json_schema_with_tools_and_system")
]


@pytest.mark.parametrize("case", RENDERED, ids=lambda c: c["name"])
def test_a_body_becomes_the_arguments_of_the_renderer(case: dict[str, Any]):
    request = chat_completions.parse(case["request"], RELEASE)
    (ask,) = request.asks
    assert ask.messages is not None
    assert render(ask.messages, **ask.options) == render(**render_arguments(case["request"]))
    wanted, asked = case["expected"]["sampling"], case["request"]
    assert ask.open_ended == (wanted["max_tokens"] is None)
    assert ask.params.seq_seed == wanted["seed"]
    assert (ask.params.logprobs is not None) == wanted["logprobs"]
    assert ask.params.logprobs == (wanted["top_logprobs"] if wanted["logprobs"] else None)
    assert list(ask.params.stop) == case["expected"]["parsing"]["stop_sequences"]
    # The service overrides these in places; here they are served as sent.
    assert ask.params.temperature == asked.get("temperature", 1.0)
    assert ask.params.top_p == asked.get("top_p", 1.0)


REFUSED = [c for c in cases("render_errors") if c["protocol"] == "chat_completions"]
# Accepted here: the developer role as system, and efforts from 1 to 100.
EXTENSIONS = {"unknown_role", "reasoning_effort_integer"}


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c["name"])
def test_a_body_that_the_service_refuses_is_refused(case: dict[str, Any]):
    def run() -> None:
        (ask,) = chat_completions.parse(case["request"], RELEASE).asks
        render(ask.messages or (), **ask.options)

    if case["expected"].get("accepted") or case["name"] in EXTENSIONS:
        run()
        return
    with pytest.raises(RequestError) as caught:
        run()
    assert all(s.endswith(".") for s in (caught.value.what, caught.value.why, caught.value.do))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"temprature": 0.5}, ["'temprature'", "Did you mean 'temperature'?"]),
        ({"top_k": 5}, ["'top_k'", "not known"]),
        ({"n": 2}, ["n is 2.", "one choice"]),
        ({"logit_bias": {"5": 1}}, ['logit_bias is {"5": 1}.']),
        ({"presence_penalty": 0.5}, ["presence_penalty is 0.5."]),
        ({"functions": []}, ["functions", "Declare the functions as tools."]),
        ({"parallel_tool_calls": False}, ["parallel_tool_calls is false."]),
        ({"store": True}, ["store is true."]),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, ["thinking has", "budget_tokens"]),
        ({"thinking": {}}, ["thinking has no member 'type'"]),
        ({"max_tokens": 5, "max_completion_tokens": 6}, ["5 and max_completion_tokens is 6"]),
        ({"max_tokens": True}, ["max_tokens is true."]),
        ({"temperature": "1"}, ['temperature is "1".']),
        ({"seed": 1.0}, ["seed is 1.0."]),
        ({"stop": ["x"] * 17}, ["of 17.", "at most 16"]),
        ({"stream_options": {"include_usage": True}}, ["stream_options without stream"]),
        ({"stream": True, "stream_options": {"usage": 1}}, ["stream_options has", "'usage'"]),
        ({"response_format": {"type": "regex", "regex": "a"}}, ["response_format", "enforce"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": True}}},
            ["response_format", "without strict"],
        ),
        ({"messages": [{"role": "user", "content": "a", "prefx": True}]}, ["messages[0]", "prefx"]),
        ({"messages": "Hi"}, ['messages is "Hi".']),
        ({"model": "gpt"}, ["'gpt'", "MODEL"]),
        ({"user": "u", "tools": {}}, ["tools is {}."]),
    ],
)
def test_what_is_not_served_as_sent_is_refused_by_name(members: dict[str, Any], words: list[str]):
    with pytest.raises(RequestError) as caught:
        parse(**members)
    error = caught.value
    assert all(word in str(error) for word in words), str(error)
    assert all(s.endswith((".", "?")) for s in (error.what, error.why, error.do))


def test_a_long_value_is_not_repeated_in_full():
    with pytest.raises(RequestError) as caught:
        parse(temperature="x" * 10_000)
    assert len(str(caught.value)) < 300


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(RequestError, match="The body is \\[1\\]"):
        chat_completions.parse([1], SERVED)


def test_members_that_ask_for_nothing_are_accepted():
    request = parse(
        n=1,
        user="u",
        metadata={"a": "b"},
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        parallel_tool_calls=True,
        service_tier="auto",
        store=False,
        top_logprobs=None,
        stream=False,
    )
    assert request == parse()


def test_an_answer_can_be_sent_back_with_its_empty_members():
    answer = {"role": "assistant", "content": "a", "refusal": None, "annotations": []}
    messages = [{"role": "user", "content": "q"}, answer, {"role": "user", "content": "r"}]
    (ask,) = parse(messages=messages).asks
    assert ask.messages == tuple(messages)


@pytest.mark.parametrize(
    ("members", "most"),
    [
        ({"thinking": {"type": "disabled"}}, 8192),
        ({"reasoning_effort": "none"}, 8192),
        ({}, 65536),
        ({"reasoning_effort": "max"}, 131072),
        ({"reasoning_effort": "ultra"}, 131072),
        ({"reasoning_effort": "max", "thinking": {"type": "disabled"}}, 8192),
    ],
)
def test_a_limit_that_was_left_out_gives_way_to_the_prompt(members: dict[str, Any], most: int):
    (ask,) = parse(**members).asks
    assert ask.params.max_tokens == most
    assert ask.fitted(10, 1_000_000).max_tokens == most
    assert ask.fitted(10, 100).max_tokens == 90
    assert ask.fitted(100, 100).max_tokens == ask.fitted(200, 100).max_tokens == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_was_asked_for_is_kept(name: str):
    (ask,) = parse(**{name: 500}).asks
    assert ask.fitted(10, 100) == ask.params
    assert ask.params.max_tokens == 500


def test_a_stream_is_recognised():
    request = parse(stream=True, stream_options={"include_usage": True})
    assert (request.stream, request.include_usage) == (True, True)
    assert not parse().stream


def test_log_probs_stand_beside_the_tokens_that_made_visible_text(tiny: Tokenizer):
    request = parse(logprobs=True, top_logprobs=2, stop="T!")
    thought, said = tiny.encode("hm", add_bos=False), tiny.encode("\nAéT!", add_bos=False)
    ids = [*thought, tiny.special("</think>"), *said]
    sample = sample_of(ids, tiny, ParserOptions("reasoning_start", stop=("T!",)), top=2)
    body = chat_completions.respond(request, [output_of(sample)], tiny, Stamp("RID", 1))
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Aé", "reasoning_content": "hm"}
    found = choice["logprobs"]
    assert list(found) == ["reasoning_content", "content"]
    assert [(e["token"], e["logprob"]) for e in found["reasoning_content"]] == [
        ("h", -1),
        ("m", -2),
    ]
    # The marker, the newline after it, and the stop string made no text.
    entries = [(e["token"], e["logprob"], e["bytes"]) for e in found["content"]]
    assert entries == [("A", -5, [65]), ("\\xc3", -6, [0xC3]), ("\\xa9", -7, [0xA9])]
    assert found["content"][0]["top_logprobs"] == [
        {"token": "A", "logprob": -5.0, "bytes": [65]},
        {"token": "@", "logprob": -6.0, "bytes": [64]},
    ]
    assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_text_around_a_json_answer_counts_for_its_first_token(tiny: Tokenizer):
    ids = tiny.encode('ok {" "}', add_bos=False)
    parser = OutputParser(ParserOptions(parse_json_output=True), tiny)
    assert list(attribute(ids, parser, tiny)) == [("content", i) for i in (0, 3, 4, 5, 6, 7)]


def test_an_answer_without_visible_text_has_no_log_probs(tiny: Tokenizer):
    request = parse(logprobs=True, thinking={"type": "disabled"})
    sample = sample_of([], tiny, ParserOptions(), top=0, end=[tiny.eos_id])
    body = chat_completions.respond(request, [output_of(sample)], tiny, Stamp("RID", 1))
    assert body["choices"][0]["logprobs"] is None


def test_calls_have_ids_of_their_own_that_repeat():
    ids = {chat_completions.call_id(name, i) for name in "ab" for i in range(3)}
    assert len(ids) == 6
    assert chat_completions.call_id("a", 2) in ids
