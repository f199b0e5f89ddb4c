"""The text of a running sequence: plain text with stop strings, or a parsed chat answer."""

from abc import ABC, abstractmethod

from deepinfer_jax.text.events import Answer, Event, ParserOptions, accumulate
from deepinfer_jax.text.incremental import Detokenizer, StopMatcher
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Tokenizer


class OutputText(ABC):
    """Takes a sequence's tokens and keeps what they say.

    Attributes:
        thinks: the text may hold reasoning.
    """

    thinks = False

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._given = 0

    @property
    @abstractmethod
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""

    @abstractmethod
    def push(self, token_id: int) -> None:
        """Take one generated token, never the one that ends the sequence."""

    @abstractmethod
    def finish(self, reason: str) -> None:
        """Release what is held back; `reason` as in `CompletionOutput.finish_reason`."""

    def whole(self) -> Answer:
        """All that is certain to stand."""
        return accumulate(self._events)

    def new(self) -> Answer:
        """What was added since the last call; these parts together are the whole."""
        begin, self._given = self._given, len(self._events)
        return accumulate(self._events[begin:])


class PlainText(OutputText):
    """The decoded tokens, cut before the first stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()):
        super().__init__()
        self._bytes, self._stops = Detokenizer(tokenizer), StopMatcher(stop)

    @property
    def stopped(self) -> str | None:
        """The stop string found, or None."""
        return self._stops.matched

    def push(self, token_id: int) -> None:
        """Take one token."""
        self._write(self._stops.push(self._bytes.push([token_id])))

    def finish(self, reason: str) -> None:
        """Release what was held back as a possible stop string or an unfinished character."""
        del reason
        if self.stopped is None:
            self._write(self._stops.push(self._bytes.finish()))
            self._write(self._stops.finish())

    def _write(self, text: str) -> None:
        if text:
            self._events.append(Event("content", text))


class ChatText(OutputText):
    """Reasoning, answer and tool calls of a chat turn; stop strings apply to the answer only."""

    def __init__(self, tokenizer: Tokenizer, options: ParserOptions):
        super().__init__()
        self._parser = OutputParser(options, tokenizer)
        self.thinks = options.initial_stage is not None

    @property
    def stopped(self) -> str | None:
        """The stop string found in the answer, or None."""
        return self._parser.stopped

    def push(self, token_id: int) -> None:
        """Take one token."""
        self._events += self._parser.push_ids([token_id])

    def finish(self, reason: str) -> None:
        """Close the answer."""
        self._events += self._parser.finish(reason)
