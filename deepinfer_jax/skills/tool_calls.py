"""Tool calls: two or three declared tools, a request that needs one of them, and its result."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_jax.skills.draws import between, chance, distinct, pick
from deepinfer_jax.skills.sample import Message, Sample, Split, admits, assistant, user
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS

_CALL_ID = "call-1"


@dataclass(frozen=True)
class _Tool:
    """One tool: declaration, argument draws, questions that need it, and an answer after it."""

    name: str
    description: str
    arguments: tuple[tuple[str, str, Callable[[np.random.Generator], Any]], ...]
    questions: tuple[str, ...]
    result: Callable[[np.random.Generator], str]
    reply: str

    def declaration(self) -> Message:
        properties = {key: {"type": kind} for key, kind, _ in self.arguments}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }


def _city(rng: np.random.Generator) -> str:
    return pick(rng, CITIES)


def _name(rng: np.random.Generator) -> str:
    return pick(rng, NAMES)


def _pair(rng: np.random.Generator) -> str:
    return f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"


def _small(rng: np.random.Generator) -> int:
    return between(rng, 2, 99)


def _code(rng: np.random.Generator) -> str:
    return str(between(rng, 10000, 99999))


def _sky(rng: np.random.Generator) -> str:
    return pick(rng, ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy"))


def _done(rng: np.random.Generator) -> str:
    return "ok"


_TOOLS = (
    _Tool(
        "get_weather",
        "Weather of a city.",
        (("city", "string", _city),),
        ("What is the weather in {city}?", "How is the weather in {city}?"),
        _sky,
        "The weather in {city} is {result}.",
    ),
    _Tool(
        "find_code",
        "Code of a person.",
        (("name", "string", _name),),
        ("Find the code of {name}.", "Please look up the code of {name}."),
        _code,
        "The code of {name} is {result}.",
    ),
    _Tool(
        "set_timer",
        "Start a timer.",
        (("minutes", "integer", _small),),
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes."),
        _done,
        "The timer of {minutes} minutes is set.",
    ),
    _Tool(
        "multiply",
        "Multiply two numbers.",
        (("x", "integer", _small), ("y", "integer", _small)),
        ("Multiply {x} by {y}.", "What is {x} times {y}?"),
        _code,
        "The product is {result}.",
    ),
    _Tool(
        "book_train",
        "Book a train.",
        (("origin", "string", _city), ("target", "string", _city)),
        ("Book a train from {origin} to {target}.", "I need a train from {origin} to {target}."),
        _done,
        "The train from {origin} to {target} is booked.",
    ),
    _Tool(
        "send_note",
        "Send a note to a person.",
        (("name", "string", _name), ("text", "string", _pair)),
        ("Send {name} the note {text}.", "Send the note {text} to {name}."),
        _done,
        "The note is sent to {name}.",
    ),
    _Tool(
        "open_project",
        "Open a project.",
        (("project", "string", _pair), ("priority", "integer", _small)),
        (
            "Open project {project} with priority {priority}.",
            "Start project {project} at priority {priority}.",
        ),
        _done,
        "Project {project} is open.",
    ),
)


def call(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A request that needs one call of a declared tool; the difficulty does not vary."""
    tools, tool, values, question = _request(rng, split)
    return Sample(
        skill="tool_call",
        kind=tool.name,
        messages=(user(question), _calling(tool, values)),
        answer="",
        thinking=chance(rng, 0.4),
        tools=tools,
    )


def reply(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """The answer to the user after a tool's result; the difficulty does not vary."""
    tools, tool, values, question = _request(rng, split)
    result = tool.result(rng)
    answer = tool.reply.format(**values, result=result)
    return Sample(
        skill="tool_reply",
        kind=tool.name,
        messages=(
            user(question),
            _calling(tool, values),
            {"role": "tool", "tool_call_id": _CALL_ID, "content": result},
            assistant(answer),
        ),
        answer=answer,
        thinking=chance(rng, 0.4),
        tools=tools,
    )


def expected_call(sample: Sample) -> tuple[str, dict[str, Any]]:
    """Name and arguments that the final message of a `call` sample makes."""
    function = sample.messages[-1]["tool_calls"][0]["function"]
    return function["name"], json.loads(function["arguments"])


def _request(
    rng: np.random.Generator, split: Split
) -> tuple[tuple[Message, ...], _Tool, dict[str, Any], str]:
    while True:
        declared = distinct(rng, _TOOLS, between(rng, 2, 3))
        tool = pick(rng, declared)
        values = {key: draw(rng) for key, _, draw in tool.arguments}
        if tool.name == "book_train" and values["origin"] == values["target"]:
            continue
        question = pick(rng, tool.questions).format(**values)
        if admits(split, f"{tool.name} {json.dumps(values)}"):
            return tuple(t.declaration() for t in declared), tool, values, question


def _calling(tool: _Tool, values: dict[str, Any]) -> Message:
    function = {"name": tool.name, "arguments": json.dumps(values)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": _CALL_ID, "type": "function", "function": function}],
    }
