"""Rendering: golden prompts, and the rules that have no golden case."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.chat_cases import cases, render_arguments, special_ranges

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.chat import ImageReference, Rendered, render
from deepinfer_jax.text.tokenizer import Tokenizer

B, E = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A, S = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
ADD = {"type": "function", "function": {"name": "add", "description": "Add."}}
SUB = {"type": "function", "function": {"name": "sub"}}


def effort(level: int) -> str:
    return (
        f"{S}Reasoning Effort: {level} (range 1-100, the higher the value, "
        "the more thorough the reasoning)\n\n"
    )


def user(content: Any = "q", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str = "add", arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def parsing_of(rendered: Rendered) -> dict[str, Any]:
    parsing = rendered.parsing
    return {
        "initial_stage": parsing.initial_stage,
        "parse_tool_calls": parsing.parse_tool_calls,
        "starts_in_tool_calls": parsing.starts_in_tool_calls,
        "parse_json_output": parsing.parse_json_output,
    }


# The golden file has one request with a regular expression, which is refused here.
RENDERED = [
    case
    for case in cases("render_chat_completions")
    if case["request"].get("response_format", {}).get("type") != "regex"
]


@pytest.mark.parametrize("case", RENDERED, ids=lambda c: c["name"])
def test_a_golden_request_renders_to_its_prompt(case: dict[str, Any]):
    rendered, wanted = render(**render_arguments(case["request"])), case["expected"]
    assert rendered.text == wanted["prompt"]
    assert [list(r) for r in special_ranges(rendered)] == wanted["special_ranges"]
    images = [(i["ref"], i["detail"], i["path"]) for i in wanted["images"]]
    ours = [(i.url, i.detail, f".messages[{i.message}]") for i in rendered.images]
    assert ours == images
    wanted["parsing"].pop("stop_sequences")
    assert parsing_of(rendered) == wanted["parsing"]
    assert rendered.thinking == wanted["conversation"]["thinking"]


@pytest.mark.parametrize("case", cases("render_reference_fixtures"), ids=lambda c: c["name"])
def test_a_fixture_of_the_checkpoints_own_encoder_renders_to_its_prompt(case: dict[str, Any]):
    rendered = render(
        case["messages"],
        thinking=case.get("thinking_mode") == "thinking",
        effort=case.get("reasoning_effort"),
        tools=case.get("tools", ()),
        add_generation_prompt=case["messages"][-1]["role"] != "assistant",
        check_history=False,
    )
    assert rendered.text == case["expected_prompt"]


def test_golden_requests_have_the_recorded_ids(release: Tokenizer):
    ids = {c["name"]: c["ids"] for c in cases("encode_ids") if c["protocol"] == "chat_completions"}
    for case in RENDERED:
        pieces = render(**render_arguments(case["request"])).pieces
        assert release.encode_pieces(pieces) == ids[case["name"]], case["name"]


def test_prompt_tokens_are_those_the_public_service_counted(release: Tokenizer):
    for case in cases("api_token_counts"):
        pieces = render([user(case["user"])], thinking=False).pieces
        assert len(release.encode_pieces(pieces)) == case["prompt_tokens"], case["user"]


@pytest.mark.parametrize(
    ("name", "level"),
    [(None, 75), ("minimal", 50), ("medium", 75), ("ultra", 100), (1, 1), (37, 37), (100, 100)],
)
def test_efforts_have_these_levels(name: str | int | None, level: int):
    rendered = render([user()], effort=name)
    assert rendered.text == f"{B}{effort(level)}{U}q{A}<think>"
    assert (rendered.effort, rendered.thinking) == (level, True)


def test_an_explicit_switch_beats_the_effort():
    assert render([user()], thinking=True, effort="none").effort == 75
    assert render([user()], thinking=None, effort="none").text == f"{B}{U}q{A}</think>"
    off = render([user()], thinking=False, effort="max")
    assert (off.text, off.effort) == (f"{B}{U}q{A}</think>", None)


@pytest.mark.parametrize("wrong", [0, 101, True, 50.0, "50", "hard", ""])
def test_an_unknown_effort_is_refused(wrong: Any):
    with pytest.raises(RequestError, match="The reasoning effort is ") as caught:
        render([user()], effort=wrong)
    assert repr(wrong) in str(caught.value)
    with pytest.raises(RequestError, match="The reasoning effort is "):
        render([user()], thinking=False, effort=wrong)


def test_developer_is_another_name_of_system():
    messages = [{"role": "developer", "content": "s"}, user()]
    assert render(messages, thinking=False).text == f"{B}{S}s{U}q{A}</think>"


def test_an_empty_system_message_is_as_none():
    empty = {"role": "system", "content": ""}
    assert render([user("a"), empty, user("b")], thinking=False).text == f"{B}{U}a\n\nb{A}</think>"
    assert render([empty], thinking=True).text == f"{B}{effort(75)}{A}<think>"


def test_reasoning_is_accepted_under_its_second_name():
    history = [user(), assistant(reasoning="r"), user("z")]
    text = render(history, tools=[ADD]).text
    assert text.endswith(f"{A}<think>r</think>a{E}{U}z{A}<think>")
    with pytest.raises(
        RequestError, match=r"messages\[1\] has reasoning_content 'x' and reasoning"
    ):
        render([user(), assistant(reasoning="r", reasoning_content="x")])


def test_a_finished_conversation_keeps_the_last_answers_reasoning():
    messages = [user("1"), assistant("a", reasoning_content="r1")]
    messages += [user("2"), assistant("b", reasoning_content="r2")]
    text = render(messages, add_generation_prompt=False).text
    assert text == (f"{B}{effort(75)}{U}1{A}</think>a{E}{U}2{A}<think>r2</think>b{E}")
    off = render(messages, add_generation_prompt=False, thinking=False).text
    assert off == f"{B}{U}1{A}</think>a{E}{U}2{A}</think>b{E}"
    assert render(messages[:2], add_generation_prompt=True).text.endswith(f"</think>a{E}{A}<think>")


def test_a_finished_conversation_may_end_in_calls():
    messages = [user(), assistant("", reasoning_content="r", tool_calls=[call()])]
    text = render(messages, tools=[ADD], add_generation_prompt=False).text
    assert text.endswith(
        f"{A}<think>r</think>\n\n<｜DSML｜ calls>\n"
        f'<｜DSML｜ invoke name="add">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{E}'
    )


def test_reasoning_after_the_last_user_message_can_be_kept_without_tools():
    messages = [
        user("1"),
        assistant("a", reasoning_content="r1"),
        user("2"),
        assistant("", reasoning_content="r2", tool_calls=[call()]),
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    dropped, kept = render(messages).text, render(messages, keep_turn_reasoning=True).text
    assert "r1" not in kept and "r2" not in dropped
    assert kept == dropped.replace(f"2{A}</think>", f"2{A}<think>r2</think>")
    after = render([*messages, user("3")], keep_turn_reasoning=True).text
    assert "r2" not in after


def test_the_last_message_can_be_continued_under_both_names():
    messages = [user(), assistant("So", reasoning_content="r")]
    wanted = render([messages[0], messages[1] | {"prefix": True}])
    assert render(messages, continue_final_message=True) == wanted
    assert wanted.text.endswith(f"{A}<think>r</think>So")
    with pytest.raises(RequestError, match="continue_final_message is set, but the last message"):
        render([user()], continue_final_message=True)


def test_a_continued_output_begins_where_the_prompt_ends():
    def stage(*messages: dict[str, Any], **options: Any) -> str | None:
        return render(messages, continue_final_message=True, **options).parsing.initial_stage

    assert stage(user(), assistant("So")) == "content_continuation"
    assert stage(user(), assistant("", reasoning_content="r")) == "reasoning_continuation"
    assert stage(user(), assistant("")) == "reasoning_start"
    assert stage(user(), assistant("So"), thinking=False) is None
    alone = assistant("", reasoning_content="r")  # its header is </think>, as in history
    assert stage(alone) == "content_continuation"
    assert stage(user(task="title"), assistant("")) == "content_continuation"


def test_a_prefix_elsewhere_is_refused():
    with pytest.raises(RequestError, match=r"messages\[0\] \(assistant\) of 2 has prefix set"):
        render([assistant(prefix=True), user()])
    with pytest.raises(RequestError, match=r"messages\[0\] \(user\) of 1 has prefix set"):
        render([user(prefix=True)])
    with pytest.raises(RequestError, match="without calls"):
        render([user(), assistant(prefix=True, tool_calls=[call()])], check_history=False)


def test_a_task_token_follows_the_header_or_the_message():
    for message in ([user(task="action")], [user()]):
        task = None if "task" in message[0] else "action"
        rendered = render(message, task=task)
        assert rendered.text == f"{B}{effort(75)}{U}q{A}<think><｜action｜>"
        assert special_ranges(rendered)[-1][1] == len(rendered.text)
        assert rendered.parsing.initial_stage == "reasoning_start"
    plain = render([user()], thinking=False, task="action")
    assert plain.text == f"{B}{U}q{A}</think><｜action｜>"
    title = render([user("a"), user("b")], tools=[ADD], task="title")
    assert title.text.endswith(f"{U}a\n\nb<｜title｜>")
    assert parsing_of(title) == parsing_of(render([user()], thinking=False))


def test_the_answer_to_a_task_has_no_reasoning_part():
    answer = assistant("yes", reasoning_content="r")
    title = render([user(task="title"), answer], add_generation_prompt=False)
    assert title.text == f"{B}{effort(75)}{U}q<｜title｜>yes{E}"
    action = render([user(task="action"), answer], add_generation_prompt=False)
    assert action.text == f"{B}{effort(75)}{U}q{A}<think><｜action｜>yes{E}"


@pytest.mark.parametrize(
    ("messages", "task", "text"),
    [
        ([user()], "sing", "messages[0] carries the task 'sing'"),
        ([user(task="query"), user()], None, "messages[0] (user) of 2 carries the task 'query'"),
        (
            [user(task="query"), {"role": "system", "content": "s"}],
            None,
            "messages[0] (user) of 2 carries the task 'query'",
        ),
        ([assistant(task="query")], None, "messages[0] (assistant) of 1 carries the task"),
        ([assistant()], "query", "The task 'query' is asked for, but the 1 messages have none"),
    ],
)
def test_a_misplaced_or_unknown_task_is_refused(messages: Any, task: str | None, text: str):
    with pytest.raises(RequestError) as caught:
        render(messages, task=task)
    assert text in str(caught.value)


def test_a_system_message_may_declare_tools_of_its_own():
    messages = [user(), {"role": "system", "content": "s", "tools": [ADD]}]
    rendered = render(messages)
    assert f"{U}q{S}s\n\n## Tools\n\n" in rendered.text
    assert rendered.parsing.parse_tool_calls


def test_images_come_in_the_order_of_their_placeholders(tiny: Tokenizer):
    def part(url: str, **more: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url, **more}}

    messages = [
        {"role": "system", "content": [part("0")]},
        user([part("1", detail="low"), {"type": "text", "text": "<｜deepseek_image｜>"}]),
        assistant("", tool_calls=[call(call_id="x"), call(call_id="y")]),
        {"role": "tool", "tool_call_id": "y", "content": [part("3")]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "image_url", "image_url": "2"}]},
    ]
    rendered = render(messages, thinking=False)
    assert rendered.images == (
        ImageReference("0", "high", 0),
        ImageReference("1", "low", 1),
        ImageReference("2", "high", 4),
        ImageReference("3", "high", 3),
    )
    ids = tiny.encode_pieces(rendered.pieces)
    assert ids.count(tiny.special("<｜deepseek_image｜>")) == 4


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "The conversation has 0 messages."),
        ([{"role": "robot", "content": "x"}], "messages[0] has the role 'robot'."),
        (["hello"], "messages[0] has the role None."),
        ([user(None)], "messages[0].content is None."),
        ([{"role": "assistant"}], "messages[0].content is None."),
        ([user(7)], "messages[0].content is 7."),
        ([user([{"type": "input_audio"}])], "messages[0].content[0] is {'type': 'input_audio'}."),
        ([user(["x"])], "messages[0].content[0] is 'x'."),
        ([user([{"type": "image_url"}])], "messages[0].content[0] is {'type': 'image_url'}."),
        (
            [user([{"type": "image_url", "image_url": {"url": "u", "detail": "x"}}])],
            "messages[0].content[0] asks for the image detail 'x'.",
        ),
        (
            [assistant([{"type": "image_url", "image_url": {"url": "u"}}])],
            "messages[0].content[0] is an image in a message of the role 'assistant'.",
        ),
        ([assistant(tool_calls="x")], "messages[0].tool_calls is 'x'."),
        ([assistant(tool_calls=[{"id": "a"}])], "tool_calls[0] of the history is {'id': 'a'}."),
        ([assistant(tool_calls=[call(name='a"b')])], "a tool name with a double quote"),
        (
            [assistant(tool_calls=[call(arguments='{"a\\"b": 1}')])],
            "a parameter name with a double quote",
        ),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused_by_place(messages: Any, text: str):
    with pytest.raises(RequestError) as caught:
        render(messages, check_history=bool(messages and "tool_calls" not in messages[0]))
    assert text in str(caught.value)


TOOL = {"role": "tool", "content": "x", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([TOOL], "messages[0] answers the call 'c1'; unanswered calls before it: none."),
        (
            [assistant(tool_calls=[call()]), TOOL | {"tool_call_id": "c2"}],
            "messages[1] answers the call 'c2'; unanswered calls before it: 'c1'.",
        ),
        ([assistant(tool_calls=[call()]), TOOL, TOOL], "messages[2] answers the call 'c1'"),
        (
            [assistant(tool_calls=[call()]), user()],
            "1 tool calls are unanswered before messages[1]: c1.",
        ),
        ([assistant(tool_calls=[call()])], "1 tool calls are unanswered at the end: c1."),
        (
            [assistant(tool_calls=[call(), call()]), TOOL, TOOL],
            "messages[0].tool_calls has the ids c1, c1.",
        ),
    ],
)
def test_calls_and_results_that_do_not_match_are_refused(messages: Any, text: str):
    with pytest.raises(RequestError) as caught:
        render([user(), *messages][1:])
    assert text in str(caught.value)
    assert render(messages, check_history=False).text


def test_results_of_unknown_calls_come_first():
    messages = [assistant(tool_calls=[call(call_id="x"), call(call_id="y")])]
    messages += [TOOL | {"tool_call_id": i, "content": i} for i in ("y", "?", "x")]
    text = render(messages, check_history=False, thinking=False).text
    parts = [f"<tool_result>{i}</tool_result>" for i in ("?", "x", "y")]
    assert "\n\n".join(parts) in text


def test_json_object_needs_the_word_json_in_a_message():
    wanted = {"type": "json_object"}
    for messages in ([user("as JSON")], [{"role": "system", "content": "Json"}, user()]):
        assert render(messages, response_format=wanted).parsing.parse_json_output
    with pytest.raises(RequestError, match="none of the 2 messages has the word 'json'"):
        render([user(), assistant(reasoning_content="json")], response_format=wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        "text",
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"schema": "{}"}},
    ],
)
def test_an_unusable_response_format_is_refused(wrong: Any):
    with pytest.raises(RequestError) as caught:
        render([user()], response_format=wrong)
    assert f"response_format is {wrong!r}." in str(caught.value)


def test_a_forced_call_clashes_with_thinking_prefix_and_task():
    forced = {"tools": [ADD], "tool_choice": "required"}
    with pytest.raises(RequestError, match="forces a call, but thinking is on"):
        render([user()], **forced)
    with pytest.raises(RequestError, match="forces a call, but the last message is a prefix"):
        render([user(), assistant(prefix=True)], thinking=False, **forced)
    with pytest.raises(RequestError, match="forces a call, but the last message carries the task"):
        render([user(task="title")], thinking=False, **forced)


def test_a_regular_expression_is_refused_because_nothing_enforces_it():
    with pytest.raises(RequestError) as caught:
        render([user()], response_format={"type": "regex", "regex": "a+"})
    assert str(caught.value) == (
        "response_format is the regular expression 'a+'. This version does not enforce a grammar, "
        "and a prompt cannot carry a regex. Leave response_format out, or describe the form in a "
        "message."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": 5}, "messages is 5. A conversation is a list of messages. Pass a list"),
        (
            {"messages": [user(), assistant(tool_calls=5)]},
            "messages[1].tool_calls is 5. It is a list of calls, each an object with id and",
        ),
        (
            {"messages": [user(task=[])]},
            "messages[0] carries the task []. The quick-instruction tasks are action, query,",
        ),
        ({"task": {}}, "messages[0] carries the task {}. The quick-instruction tasks are"),
        ({"tools": 5}, "tools is 5. It is a list of function declarations, {'type': 'function'"),
        ({"tools": {"name": "f"}}, "tools is {'name': 'f'}. It is a list of function"),
        (
            {"messages": [{"role": "system", "content": "", "tools": 5}, user()]},
            "tools is 5. It is a list",
        ),
        ({"thinking": "no"}, "thinking is 'no'. It is a switch; how much to think is the effort."),
    ],
)
def test_malformed_json_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(RequestError) as caught:
        render(**({"messages": [user()]} | arguments))
    assert message in str(caught.value)


def scrambled(value: Any) -> st.SearchStrategy[Any]:
    """`value` with some of its parts replaced by other JSON, and some keys left out."""
    if isinstance(value, dict):
        parts = {key: scrambled(part) for key, part in value.items()}
        inner = st.fixed_dictionaries({}, optional=parts) | st.fixed_dictionaries(parts)
    elif isinstance(value, list):
        inner = st.tuples(*map(scrambled, value)).map(list)
    else:
        inner = st.just(value)
    return st.one_of(inner, inner, inner, JSON)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 101) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
REQUEST = {
    "messages": [
        {"role": "system", "content": "json", "tools": [{**ADD}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "assistant", "content": "a", "prefix": True},
        {"role": "user", "content": "q", "task": "title"},
    ],
    "thinking": False,
    "effort": "high",
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "task": None,
}


@settings(max_examples=400, deadline=None)
@given(scrambled(REQUEST).filter(lambda r: isinstance(r, dict)), st.data())
def test_whatever_json_arrives_is_rendered_or_refused(request: dict[str, Any], data: st.DataObject):
    given_ = {key: value for key, value in request.items() if key in REQUEST}
    given_.setdefault("messages", data.draw(JSON))
    if isinstance(given_["messages"], list) and data.draw(st.booleans()):
        given_["messages"] = given_["messages"][: data.draw(st.integers(0, 7))]
    try:
        rendered = render(**given_)
    except RequestError as error:
        assert all((error.what, error.why, error.do))
    else:
        assert rendered.text
