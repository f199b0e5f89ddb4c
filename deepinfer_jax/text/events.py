"""What parsed output consists of: the parser's options, its events, and the whole answer."""

import itertools
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
    """A parsed output, or the part of one that is new."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None


def merge(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring events of the same text or the same call's arguments."""
    merged: list[Event] = []
    for (kind, index), run in itertools.groupby(events, lambda e: (e.kind, e.index)):
        if kind in ("reasoning", "content", "tool_args"):
            merged.append(Event(kind, "".join(e.text for e in run), index))
        else:
            merged += run
    return merged


def accumulate(events: Iterable[Event]) -> Answer:
    """The answer, or the part of one, that the events describe.

    Arguments whose call began before the first event are a `ToolCall` without a name.
    """
    reasoning: list[str] = []
    content: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    reason = None
    for event in events:
        match event.kind:
            case "reasoning":
                reasoning.append(event.text)
            case "content":
                content.append(event.text)
            case "finish":
                reason = event.text
            case kind:
                index = event.index or 0
                parts = arguments.setdefault(index, [])
                if kind == "tool_begin":
                    names[index] = event.text
                else:
                    parts.append(event.text)
    calls = (ToolCall(names.get(i, ""), "".join(parts), i) for i, parts in arguments.items())
    return Answer("".join(reasoning), "".join(content), tuple(calls), reason)
