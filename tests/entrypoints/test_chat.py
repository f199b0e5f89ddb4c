import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from deepinfer_jax import SamplingParams
from deepinfer_jax.entrypoints import chat
from deepinfer_jax.entrypoints.chat import Conversation
from deepinfer_jax.entrypoints.progress import Live
from deepinfer_jax.errors import RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput, ToolCall
from deepinfer_jax.text.chat import render

SHORT = ("--max-tokens", "4", "--quiet")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Scripted:
    """Answers each turn with the next of its outputs, in parts; keeps the messages it saw."""

    def __init__(self, *outputs):
        self.outputs, self.seen, self.options = list(outputs), [], {}

    def manifest(self):
        return {"level": "R1"}

    def stream_chat(self, messages, params, **options):
        self.seen.append([dict(m) for m in messages])
        self.options = options
        whole = self.outputs.pop(0)
        for sample in whole.outputs:
            for text, reasoning in [("", c) for c in sample.reasoning or ""] + [
                (c, None) for c in sample.text
            ]:
                part = CompletionOutput(index=0, text=text, token_ids=(), reasoning=reasoning)
                yield replace(whole, outputs=(part,), finished=False)
        last = [replace(s, text="", reasoning=None) for s in whole.outputs]
        yield replace(whole, outputs=tuple(last))


def said(text="", reasoning=None, calls=(), error=None):
    sample = CompletionOutput(
        index=0,
        text=text,
        token_ids=(1,),
        reasoning=reasoning,
        finish_reason="stop",
        tool_calls=tuple(ToolCall(*call, i) for i, call in enumerate(calls)),
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(0,),
        outputs=() if error else (sample,),
        finished=True,
        error=error,
    )


@pytest.fixture
def scripted(monkeypatch):
    def scripted(*outputs):
        llm = Scripted(*outputs)
        monkeypatch.setattr(chat, "open_engine", lambda live, **arguments: llm)
        return llm

    return scripted


@pytest.fixture
def typed(monkeypatch):
    """Type these lines, then end the input."""

    def typed(*lines):
        rest, prompts = list(lines), []

        def read(prompt):
            prompts.append(prompt)
            if not rest:
                raise EOFError
            return rest.pop(0)

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", read)
        return prompts

    return typed


def test_a_message_is_answered_as_the_library_does(deepinfer, opened, tiny_llm):
    code, out, _ = deepinfer("chat", "--message", "hi", "--system", "Be brief.", "--json", *SHORT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    (expected,) = tiny_llm.chat(messages, SamplingParams(temperature=0, max_tokens=4))
    found = json.loads(out)
    assert code == 0
    assert found["answers"][0]["token_ids"] == list(expected.outputs[0].token_ids)
    assert found["answers"][0]["reasoning"] == expected.outputs[0].reasoning
    assert found["messages"][:2] == messages
    assert found["messages"][2]["role"] == "assistant"
    assert found["error"] is None


@pytest.mark.parametrize("arguments", [("--no-thinking",), ("--effort", "none")])
def test_thinking_can_be_turned_off(deepinfer, opened, tiny_llm, arguments):
    _, out, err = deepinfer("chat", "--message", "hi", *arguments, "--max-tokens", "4")
    params = SamplingParams(temperature=0, max_tokens=4)
    (expected,) = tiny_llm.chat([{"role": "user", "content": "hi"}], params, thinking=False)
    assert expected.outputs[0].reasoning is None
    assert out == expected.outputs[0].text + "\n"
    assert "cut off after 4 tokens (--max-tokens)" in err


def test_an_unknown_effort_fails_and_says_why(deepinfer, opened):
    code, _, err = deepinfer("chat", "--message", "hi", "--effort", "lots", *SHORT)
    assert code == 1
    assert err.startswith("RequestError: The reasoning effort is 'lots'.")


def test_messages_are_answered_in_sequence_with_their_history(deepinfer, scripted):
    llm = scripted(said("one", "because"), said("two"))
    code, out, _ = deepinfer("chat", "--message", "a", "--message", "b", *SHORT)
    assert (code, out) == (0, "because\n\none\ntwo\n")
    assert llm.seen[1] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", "reasoning_content": "because"},
        {"role": "user", "content": "b"},
    ]


def test_the_message_after_a_tool_call_is_its_result(deepinfer, scripted):
    llm = scripted(said(calls=[("look", '{"a":1}'), ("look", '{"a":2}')]), said("found"))
    turns = [x for text in ("find", "one", "two") for x in ("--message", text)]
    code, out, _ = deepinfer("chat", *turns, *SHORT)
    *lines, last = out.splitlines()
    assert (code, last) == (0, "found")
    assert [json.loads(line) for line in lines] == [
        {"name": "look", "arguments": '{"a":1}'},
        {"name": "look", "arguments": '{"a":2}'},
    ]
    call, *replies = llm.seen[1][1:]
    assert [c["id"] for c in call["tool_calls"]] == ["call_0", "call_1"]
    assert replies == [
        {"role": "tool", "tool_call_id": "call_0", "content": "one"},
        {"role": "tool", "tool_call_id": "call_1", "content": "two"},
    ]


def test_a_history_with_calls_and_results_can_be_rendered():
    llm = Scripted(said(calls=[("look", "{}")]))
    talk = Conversation(llm, SamplingParams(), {"tools": [TOOL]}, "Be brief.")
    assert talk.add("find")
    assert talk.answer().outputs[0].tool_calls == (ToolCall("look", "{}"),)
    assert talk.add("right here")
    text = "".join(piece.text for piece in render(talk.messages, tools=[TOOL]).pieces)
    assert "look" in text
    assert "right here" in text


def test_messages_that_end_before_every_result_are_refused(deepinfer, scripted):
    scripted(said(calls=[("look", "{}"), ("look", "{}")]))
    code, _, err = deepinfer("chat", "--message", "find", "--message", "one", *SHORT)
    assert code == 1
    assert err.splitlines() == [
        "RequestError: The messages end while 1 tool calls have no result: call_1.",
        "  The model goes on when each of its calls has one.",
        "  Add a --message for each.",
    ]


def test_a_failed_turn_ends_given_messages(deepinfer, scripted):
    llm = scripted(said(error=RequestError("Too long.", "Why.", "Do.")), said("never"))
    code, out, err = deepinfer("chat", "--message", "a", "--message", "b", "--json", *SHORT)
    assert code == 1
    assert len(llm.seen) == 1
    assert json.loads(out)["error"]["what"] == "Too long."
    assert err.startswith("RequestError: Too long.")


def test_out_holds_a_line_for_every_answer_failed_ones_too(deepinfer, scripted, tmp_path):
    failed = said(error=RequestError("Too long.", "Why.", "Do."))
    scripted(said("one", "because"), said("two"), failed)
    turns = [x for text in "abc" for x in ("--message", text)]
    code, out, _ = deepinfer("chat", *turns, "--out", str(tmp_path / "run"), *SHORT)
    assert (code, out) == (1, "because\n\none\ntwo\n")
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["request_id"] for row in rows] == ["0", "1", "2"]
    assert [o["text"] for row in rows for o in row["outputs"]] == ["one", "two"]
    assert rows[0]["outputs"][0]["reasoning"] == "because"
    assert rows[2]["error"]["what"] == "Too long."
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"level": "R1"}


def test_typed_turns_keep_their_history_until_quit(deepinfer, scripted, typed):
    llm = scripted(said("one"), said("two"))
    prompts = typed("a", "", "b", "/quit", "c")
    code, out, _ = deepinfer("chat", *SHORT)
    assert (code, out) == (0, "one\ntwo\n")
    assert [m["content"] for m in llm.seen[1]] == ["a", "one", "b"]
    assert prompts == ["> "] * 4


def test_a_typed_turn_that_fails_is_taken_back(deepinfer, scripted, typed):
    error = RequestError("Too long.", "Why.", "Do.")
    llm = scripted(
        said(error=error), said(calls=[("look", "{}")]), said(error=error), said("found")
    )
    prompts = typed("too long", "find", "long result", "short result")
    code, out, err = deepinfer("chat", *SHORT)
    assert code == 1
    assert err.count("RequestError: Too long.") == 2
    assert [m["content"] for m in llm.seen[1]] == ["find"]
    assert [m["content"] for m in llm.seen[3]] == ["find", "", "short result"]
    call = "result of call_0> "
    assert prompts == ["> ", "> ", call, call, "> "]
    assert out.endswith("found\n\n")


def test_a_terminal_shows_reasoning_dim(deepinfer, opened, monkeypatch):
    terminal = Console(file=Terminal(), force_terminal=True, markup=False, highlight=False)
    monkeypatch.setattr(chat, "console", lambda: terminal)
    deepinfer("chat", "--message", "hi", *SHORT)
    assert "\x1b[2m" in terminal.file.getvalue()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [((), "chat has no --message and no terminal."), (("--json",), "no --message under --json.")],
)
def test_without_messages_and_terminal_there_is_nothing_to_answer(
    deepinfer, opened, monkeypatch, arguments, what
):
    monkeypatch.setattr("sys.stdin", io.StringIO("ignored"))
    code, _, err = deepinfer("chat", *arguments)
    assert code == 2
    assert what in err
    assert "Add --message TEXT, once for every turn." in err
    assert opened == []


def test_tools_and_switches_reach_the_renderer(deepinfer, scripted, tmp_path):
    llm = scripted(said("done"))
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    arguments = ("--message", "hi", "--tools", str(tmp_path / "tools.json"), "--effort", "40")
    deepinfer("chat", *arguments, "--thinking", *SHORT)
    assert llm.options == {"thinking": True, "effort": 40, "tools": [TOOL]}


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "cannot be read as JSON (JSONDecodeError"), ("{}", "holds dict, not a list.")],
)
def test_a_file_that_declares_no_tools_is_refused(deepinfer, opened, tmp_path, content, words):
    (tmp_path / "tools.json").write_text(content)
    code, _, err = deepinfer("chat", "--message", "hi", "--tools", str(tmp_path / "tools.json"))
    assert code == 2
    assert words in err


def test_progress_says_when_an_answer_was_cut_off():
    cut = CompletionOutput(index=0, text="abc", token_ids=(1, 2), finish_reason="length")
    output = RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=(0,), outputs=(cut,), finished=True
    )
    talk = Conversation(Scripted(output), SamplingParams(), {})
    talk.add("a")
    told = Console(file=io.StringIO(), force_terminal=False)
    chat._answer(talk, None, Live(console=told))
    assert told.file.getvalue().endswith("cut off after 2 tokens (--max-tokens)\n")
