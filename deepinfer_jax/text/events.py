"""What parsed output consists of: the parser's options, its events, and the whole answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from deepinfer_jax.request import ToolCall

Stage = Literal["reasoning_start", "reasoning_continuation", "content_continuation"]
EventKind = Literal["reasoning", "content", "tool_begin", "tool_args", "finish"]


@dataclass(frozen=True)
class ParserOptions:
    """Where an answer begins and what to look for in it.

    Attributes:
        initial_stage: where a thinking model's output begins: a new turn's reasoning, a continued
            reasoning, or a continued answer; None when it does not think.
        parse_tool_calls: tools are declared, so call blocks are markup and not text.
        starts_in_tool_calls: the prompt opened a call block; beats `initial_stage`.
        parse_json_output: the answer is one JSON value, maybe fenced; text around it is skipped.
        stop: strings that end the answer; not looked for in reasoning and tool calls.
    """

    initial_stage: Stage | None = None
    parse_tool_calls: bool = False
    starts_in_tool_calls: bool = False
    parse_json_output: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Event:
    """A piece of the parsed output.

    Attributes:
        kind: reasoning, content, tool_begin (text: the tool's name), tool_args (text: a fragment
            of the JSON arguments), or finish (text: the finish reason).
        text: see `kind`.
        index: number of the tool call, from 0, for the tool kinds.
    """

    kind: EventKind
    text: str
    index: int | None = None


@dataclass(frozen=True)
class Answer:
    """A whole parsed output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None


def merge(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring events of the same text or the same call's arguments."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        same = last is not None and (last.kind, last.index) == (event.kind, event.index)
        if last is not None and same and event.kind in ("reasoning", "content", "tool_args"):
            merged[-1] = Event(event.kind, last.text + event.text, event.index)
        else:
            merged.append(event)
    return merged


def accumulate(events: Iterable[Event]) -> Answer:
    """The whole answer that the events of one output describe."""
    text = {"reasoning": "", "content": ""}
    calls: list[ToolCall] = []
    reason = None
    for event in merge(events):
        match event.kind:
            case "tool_begin":
                calls.append(ToolCall(event.text, ""))
            case "tool_args":
                calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + event.text)
            case "finish":
                reason = event.text
            case kind:
                text[kind] += event.text
    return Answer(text["reasoning"], text["content"], tuple(calls), reason)
