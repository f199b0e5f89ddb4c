"""Golden chat cases, and how a Chat Completions request becomes arguments of `render`."""

import itertools
import json
from pathlib import Path
from typing import Any

from deepinfer_jax.text.chat import Rendered

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{name}.json").read_text())["cases"]


def special_ranges(rendered: Rendered) -> list[tuple[int, int]]:
    """Half-open character ranges of the prompt's text that its special pieces cover, in order."""
    ends = list(itertools.accumulate(len(piece.text) for piece in rendered.pieces))
    pairs = zip(rendered.pieces, ends, strict=True)
    return [(end - len(piece.text), end) for piece, end in pairs if piece.special]


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
