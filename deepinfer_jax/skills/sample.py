"""One generated conversation, and the rule that keeps held-out prompts out of training.

Seeds from 2^31 on are held out. Where prompts could repeat by chance (sums, lists, records, calls),
a hash of their content decides which side may use them, so no trained prompt equals a held-out one.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_jax.errors import ConfigError

HELD_OUT_SEED = 2**31
"""First seed of the held-out range; training uses seeds 0..HELD_OUT_SEED-1."""

Split = Literal["train", "held_out"]
Message = Mapping[str, Any]

_HELD_OUT_SHARE = 16  # one content in this many belongs to the held-out side


@dataclass(frozen=True)
class Sample:
    """A conversation whose last message is the assistant turn to learn or to be graded on.

    Attributes:
        skill: the family, for example "lookup".
        kind: the sort of task inside the family, for example "city".
        messages: chat messages for the renderer, final assistant turn included.
        answer: the exact final text expected ("" for a tool call, whose expected name and
            arguments stand in the final message).
        thinking: whether the conversation is rendered in thinking mode.
        tools: tool declarations.
        response_format: as the renderer takes it, or None.
        effort: reasoning effort as the renderer takes it, or None for the default.
        needle: lookups: the sentence of the document that holds the asked value; else "".
        value: lookups: the asked value; else "".
        loss: "all": every assistant turn is trained on; "final": only the last.
    """

    skill: str
    kind: str
    messages: tuple[Message, ...]
    answer: str
    thinking: bool = False
    tools: tuple[Message, ...] = ()
    response_format: Message | None = None
    effort: str | int | None = None
    needle: str = ""
    value: str = ""
    loss: Literal["all", "final"] = "all"


def user(content: str) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str = "") -> Message:
    """A finished assistant message with its reasoning (rendered in thinking mode only)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def split_of(seed: int) -> Split:
    """The side a seed belongs to. Raises ConfigError for a negative seed."""
    if seed < 0:
        raise ConfigError(
            f"The data seed is {seed}.",
            "Seeds count from 0, and those from 2^31 on are held out.",
            "Use a seed of 0 or more.",
        )
    return "train" if seed < HELD_OUT_SEED else "held_out"


def admits(split: Split | None, content: str) -> bool:
    """Whether a prompt of this content is in `split`: one in 16 is held out; None takes all."""
    if split is None:
        return True
    held_out = zlib.crc32(content.encode()) % _HELD_OUT_SHARE == 0
    return held_out == (split == "held_out")
