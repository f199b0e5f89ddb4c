"""The text of a running sequence: plain text with stop strings, or a parsed chat answer."""

from typing import Protocol

from deepinfer_jax.request import ToolCall
from deepinfer_jax.text.events import Event, ParserOptions, accumulate
from deepinfer_jax.text.incremental import Detokenizer, StopMatcher
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Tokenizer


class OutputText(Protocol):
    """What a sequence needs of its text.

    Attributes:
        stopped: the stop string that ended the text, or None.
        text, reasoning, tool_calls: so far; reasoning is None outside a chat.
    """

    @property
    def stopped(self) -> str | None: ...  # noqa: D102

    def push(self, token_id: int) -> None:
        """Take one generated token, never the one that ends the sequence."""
        ...

    def finish(self, reason: str) -> None:
        """Release what is held back; `reason` as in `CompletionOutput.finish_reason`."""
        ...

    @property
    def text(self) -> str: ...  # noqa: D102

    @property
    def reasoning(self) -> str | None: ...  # noqa: D102

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]: ...  # noqa: D102


class PlainText:
    """The decoded tokens, cut before the first stop string."""

    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        self._bytes, self._stops = Detokenizer(tokenizer), StopMatcher(stop)
        self._parts: list[str] = []

    @property
    def stopped(self) -> str | None:
        """The stop string found, or None."""
        return self._stops.matched

    @property
    def text(self) -> str:
        """What is certain to stand."""
        return "".join(self._parts)

    def push(self, token_id: int) -> None:
        """Take one token."""
        self._parts.append(self._stops.push(self._bytes.push([token_id])))

    def finish(self, reason: str) -> None:
        """Release what was held back as a possible stop string or an unfinished character."""
        del reason
        if self.stopped is None:
            self._parts.append(self._stops.push(self._bytes.finish()))
            self._parts.append(self._stops.finish())


class ChatText:
    """Reasoning, answer and tool calls of a chat turn; stop strings apply to the answer only."""

    def __init__(self, tokenizer: Tokenizer, options: ParserOptions):
        self._parser = OutputParser(options, tokenizer)
        self._events: list[Event] = []
        self._thinks = options.initial_stage is not None

    @property
    def stopped(self) -> str | None:
        """The stop string found in the answer, or None."""
        return self._parser.stopped

    @property
    def text(self) -> str:
        """The answer."""
        return accumulate(self._events).content

    @property
    def reasoning(self) -> str | None:
        """What was thought; None when the model was not asked to think."""
        return accumulate(self._events).reasoning if self._thinks else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls so far."""
        return accumulate(self._events).tool_calls

    def push(self, token_id: int) -> None:
        """Take one token."""
        self._events += self._parser.push_ids([token_id])

    def finish(self, reason: str) -> None:
        """Close the answer."""
        self._events += self._parser.finish(reason)
