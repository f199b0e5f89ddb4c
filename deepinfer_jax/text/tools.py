"""Tools in prompts: declarations and their checks, the tools text, calls of the history."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.spellings import DSML, THINK, THINK_END
from deepinfer_jax.text.tokenizer import Piece

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_OUR_MARKS = re.compile(f"({re.escape(DSML)}|{re.escape(THINK)}|{re.escape(THINK_END)})")

_BEFORE_SCHEMAS = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning \
inside {THINK}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_AFTER_SCHEMAS = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True)
class Tool:
    """One declared function: its name, description and JSON schema of its parameters."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def parse_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Check Chat-Completions tool declarations (`{"type": "function", "function": {...}}`).

    A `strict` tool gets `additionalProperties: false` in every object of its schema. Raises
    RequestError for a bad or repeated name and for parameters that are no object schema.
    """
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(
            f"tools is {tools!r}.",
            "It is a list of function declarations, {'type': 'function', 'function': {...}}.",
            "Pass a list; an empty one declares no tool.",
        )
    parsed = tuple(_parse_tool(i, tool) for i, tool in enumerate(tools))
    names = [t.name for t in parsed]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(
                f"The tool name {name!r} is declared {names.count(name)} times.",
                "The model's calls name a tool, so names must be unique.",
                "Rename or remove the repeated tools.",
            )
    return parsed


def choose_tools(
    tools: Sequence[Tool], choice: str | Mapping[str, Any] | None
) -> tuple[tuple[Tool, ...], bool]:
    """Apply `tool_choice`: the tools that the prompt declares, and whether a call is forced.

    `choice` is None or "auto", "none", "required", or a named function. Without tools it has
    nothing to act on. Raises RequestError for an unknown choice or an undeclared name.
    """
    if choice is None or choice == "auto":
        return tuple(tools), False
    if choice == "none":
        return (), False
    if choice == "required":
        return tuple(tools), bool(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {choice!r}.",
            "It must be 'auto', 'none', 'required' or a named function, "
            "{'type': 'function', 'function': {'name': ...}}.",
            "Use one of these.",
        )
    if not tools:
        return (), False
    named = tuple(t for t in tools if t.name == name)
    if not named:
        raise RequestError(
            f"tool_choice names the function {name!r}, but the tools are "
            f"{', '.join(t.name for t in tools)}.",
            "A call can only be forced to a declared tool.",
            "Name a declared tool, or declare this one.",
        )
    return named, True


def tools_text(tools: Sequence[Tool]) -> Iterator[Piece]:
    """The pieces that declare the tools in a system message."""
    yield from _ours(_BEFORE_SCHEMAS)
    lines = [
        prompt_json({"name": t.name, "description": t.description, "parameters": t.parameters})
        for t in tools
    ]
    yield Piece("\n".join(lines) + _AFTER_SCHEMAS)


def open_calls() -> Iterator[Piece]:
    """The pieces that open a block of calls after an answer or a header."""
    yield from _ours(f"\n\n<{DSML} calls>\n")


def calls_text(calls: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """The pieces of an assistant message's calls (`{"function": {"name", "arguments"}}`).

    Arguments that are not the JSON text of an object stand as one string parameter named
    `arguments`. Raises RequestError for a call that the format cannot express.
    """
    yield from open_calls()
    for i, call in enumerate(calls):
        function = call.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments", "") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise RequestError(
                f"tool_calls[{i}] of the history is {call!r}.",
                "A call needs function.name and function.arguments, both strings "
                "(arguments is JSON text).",
                "Pass the call as the model's answer gave it.",
            )
        yield from _ours(f"<{DSML} invoke name=")
        yield Piece(f'"{_quotable(name, "a tool name")}">\n')
        for j, (key, value) in enumerate(_parameters(arguments)):
            is_text = isinstance(value, str)
            yield from _ours(f"\n<{DSML} parameter name=" if j else f"<{DSML} parameter name=")
            kind = "true" if is_text else "false"
            text = value if is_text else prompt_json(value)
            yield Piece(f'"{_quotable(key, "a parameter name")}" string="{kind}">{text}')
            yield from _ours(f"</{DSML} parameter>")
        yield from _ours(f"\n</{DSML} invoke>\n")
    yield from _ours(f"</{DSML} calls>")


def prompt_json(value: Any) -> str:
    """JSON as prompts print it: `", "` and `": "` separators, non-ASCII characters as they are.

    Raises RequestError for a value that is not JSON, such as NaN.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"A value of the request cannot be written as JSON ({error}).",
            "Schemas and arguments stand in the prompt as JSON text.",
            "Use only objects, arrays, strings, finite numbers, booleans and null.",
        ) from None


def _ours(text: str) -> Iterator[Piece]:
    """Split text written by this module, never a user's, at the marks that are special tokens."""
    for part in _OUR_MARKS.split(text):
        if part:
            yield Piece(part, special=_OUR_MARKS.fullmatch(part) is not None)


def _quotable(name: str, what: str) -> str:
    if '"' in name:
        raise RequestError(
            f"The history has {what} with a double quote: {name!r}.",
            "Names stand between double quotes in the prompt and are not escaped.",
            "Rename it without the quote.",
        )
    return name


def _parameters(arguments: str) -> list[tuple[str, Any]]:
    try:
        value = strict_json(arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return [("arguments", arguments)]
    return list(value.items())


def strict_json(text: str) -> Any:
    """Parse JSON text without Python's extensions.

    Raises ValueError also for NaN and infinities, numbers that overflow, unpaired surrogates and
    nesting beyond what can be parsed.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # refuses escaped unpaired surrogates
    except RecursionError:
        raise ValueError("the text is nested too deeply") from None
    return value


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} overflows")
    return value


def _parse_tool(index: int, raw: Mapping[str, Any]) -> Tool:
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or raw.get("type") != "function":
        raise RequestError(
            f"tools[{index}] is {raw!r}.",
            "Only functions can be declared, as {'type': 'function', 'function': {...}}.",
            "Declare a function, or remove the entry.",
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"tools[{index}] has the name {name!r}.",
            "A tool name consists of the letters a-z and A-Z, digits, '_' and '-'.",
            "Rename the tool.",
        )
    description = function.get("description")
    if not isinstance(description, str | None):
        raise RequestError(
            f"The tool {name!r} has the description {description!r}.",
            "A description is a string.",
            "Write it as text, or leave it out.",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object"} if function.get("strict") else {}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"The tool {name!r} has parameters that are no object schema: {parameters!r}.",
            "A call passes named parameters, so their schema has type 'object'.",
            "Use {'type': 'object', 'properties': {...}}.",
        )
    if function.get("strict"):
        try:
            parameters = _strict(name, parameters)
        except RecursionError:
            raise RequestError(
                f"The schema of the strict tool {name!r} is nested too deeply.",
                "Each of its objects is closed in turn.",
                "Nest it less, or set strict to false.",
            ) from None
    return Tool(name, description or "", parameters)


def _strict(tool: str, schema: Any) -> Any:
    """The schema with every object closed: all properties required, no others allowed."""
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _strict_member(tool, key, value) for key, value in schema.items()}
    if schema.get("type") != "object":
        return inner
    properties = inner.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(
            f"The strict tool {tool!r} has the properties {properties!r}.",
            "Properties are an object of names and their schemas.",
            "Use {'name': {...}}, or set strict to false.",
        )
    required = inner.get("required", list(properties))
    names = isinstance(required, list | tuple) and all(isinstance(r, str) for r in required)
    if not names:
        raise RequestError(
            f"The strict tool {tool!r} has an object with required {required!r}.",
            "It lists the names of the properties that a call must give.",
            "Use a list of strings, or set strict to false.",
        )
    if set(required) != set(properties) or schema.get("additionalProperties", False) is not False:
        raise RequestError(
            f"The strict tool {tool!r} has an object with the properties {list(properties)}, "
            f"required {list(required)} and additionalProperties "
            f"{schema.get('additionalProperties', False)}.",
            "Required properties must match all properties in the object, and no others are "
            "allowed, when strict is true.",
            "List every property in required, or set strict to false.",
        )
    closed = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": required,
    }
    return closed | {key: value for key, value in inner.items() if key not in closed}


def _strict_member(tool: str, key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _strict(tool, schema) for name, schema in value.items()}
    if key == "anyOf" and isinstance(value, list):
        return [_strict(tool, schema) for schema in value]
    return _strict(tool, value) if key == "items" else value
