"""Request-level switches of a chat: thinking and effort, and the response format."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling_params import ParameterError
from deepinfer_jax.text.tools import prompt_json

_TIERS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_ALIASES = {"minimal": "low", "medium": "high", "ultra": "max"}
_DEFAULT_EFFORT = 75


def resolve_thinking(thinking: bool | None, effort: str | int | None) -> tuple[bool, int]:
    """Whether the model thinks, and its reasoning effort in 1..100.

    `thinking` None means not said: on, unless the effort is "none". A given switch beats the
    effort: with True, "none" means the default effort of 75. Raises RequestError for an unknown
    effort, and for a switch that is neither True, False nor None.
    """
    if not isinstance(thinking, bool | None):
        raise RequestError(
            f"thinking is {thinking!r}.",
            "It is a switch; how much to think is the effort.",
            "Pass True, False, or None to leave it to the effort.",
        )
    level = _effort_level(effort)
    if thinking is None:
        thinking = level != 0
    return thinking, level or _DEFAULT_EFFORT


def _effort_level(effort: str | int | None) -> int:
    if effort is None:
        return _DEFAULT_EFFORT
    if effort == "none":
        return 0
    if isinstance(effort, str) and (tier := _ALIASES.get(effort, effort)) in _TIERS:
        return _TIERS[tier]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    raise RequestError(
        f"The reasoning effort is {effort!r}.",
        "It is one of none, minimal, low, medium, high, xhigh, max, ultra, or a whole number "
        "from 1 to 100.",
        "Use one of these.",
    )


class ChatOptions(TypedDict, total=False):
    """How `LLM.chat` renders a conversation; `LLM.stream_chat` takes them as keywords."""

    thinking: bool | None
    effort: str | int | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: Any
    response_format: Any
    task: str | None


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse the keywords of `stream_chat` that are not in `ChatOptions` (ParameterError)."""
    legal = list(ChatOptions.__annotations__)
    for name in options:
        if name not in legal:
            nearest = difflib.get_close_matches(name, legal, n=1, cutoff=0.0)[0]
            raise ParameterError(
                f"stream_chat got an unknown keyword {name!r}.",
                f"Its keywords are those of chat: {', '.join(legal)}.",
                f"Did you mean {nearest!r}?",
            )


@dataclass(frozen=True)
class ResponseFormat:
    """What the answer is asked to look like: kind is text, json_object or json_schema.

    Attributes:
        kind: the request's `type`.
        schema: the JSON schema (json_schema), else None.
    """

    kind: str = "text"
    schema: Any = None

    @property
    def instruction(self) -> str | None:
        """The text that the first system message ends with, or None when nothing is written."""
        if self.kind == "text":
            return None
        schema = {"type": "json_object"} if self.kind == "json_object" else self.schema
        return (
            "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
            + prompt_json(schema)
        )


def parse_response_format(raw: Mapping[str, Any] | None) -> ResponseFormat:
    """Check a Chat-Completions `response_format`. Raises RequestError for an unusable one."""
    if raw is None:
        return ResponseFormat()
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind in ("text", "json_object"):
        return ResponseFormat(kind)
    if kind == "json_schema":
        inner = raw.get("json_schema")
        if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping | bool):
            return ResponseFormat(kind, schema=inner["schema"])
    if kind == "regex":
        raise RequestError(
            f"response_format is the regular expression {raw.get('regex')!r}.",
            "This version does not enforce a grammar, and a prompt cannot carry a regex.",
            "Leave response_format out, or describe the form in a message.",
        )
    raise RequestError(
        f"response_format is {raw!r}.",
        "It has type 'text', 'json_object', or 'json_schema' with json_schema.schema.",
        "Use one of these forms.",
    )
