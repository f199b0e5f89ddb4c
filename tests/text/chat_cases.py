"""Golden chat cases, and how a Chat Completions request becomes arguments of `render`."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text())["cases"]


def render_arguments(request: dict[str, Any]) -> dict[str, Any]:
    """The `render` keywords of a Chat Completions body."""
    switch = request.get("thinking", {}).get("type")
    return {
        "messages": request["messages"],
        "thinking": None if switch is None else switch != "disabled",
        "effort": request.get("reasoning_effort"),
        "tools": request.get("tools", ()),
        "tool_choice": request.get("tool_choice"),
        "response_format": request.get("response_format"),
    }
