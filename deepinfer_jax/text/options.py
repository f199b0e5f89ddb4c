"""Request-level switches of a chat: thinking and effort, and the response format."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.tools import prompt_json

_TIERS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_ALIASES = {"minimal": "low", "medium": "high", "ultra": "max"}
_DEFAULT_EFFORT = 75


def resolve_thinking(thinking: bool | None, effort: str | int | None) -> tuple[bool, int]:
    """Whether the model thinks, and its reasoning effort in 1..100.

    `thinking` None means not said: on, unless the effort is "none". A given switch beats the
    effort: with True, "none" means the default effort of 75. Raises RequestError for an unknown
    effort.
    """
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


@dataclass(frozen=True)
class ResponseFormat:
    """What the answer must look like: kind is text, json_object, json_schema or regex.

    Attributes:
        kind: the request's `type`.
        schema: the JSON schema (json_schema), else None.
        regex: the regular expression (regex), else None.
    """

    kind: str = "text"
    schema: Any = None
    regex: str | None = None

    @property
    def instruction(self) -> str | None:
        """The text that the first system message ends with, or None when nothing is written."""
        if self.kind in ("text", "regex"):
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
    elif kind == "regex" and isinstance(raw.get("regex"), str):
        return ResponseFormat(kind, regex=raw["regex"])
    raise RequestError(
        f"response_format is {raw!r}.",
        "It has type 'text', 'json_object', 'json_schema' with json_schema.schema, or 'regex' "
        "with regex.",
        "Use one of these forms.",
    )
