"""The streaming output parser: generated ids or text in, reasoning, answer and tool calls out.

One state machine over symbols. From token ids, a marker counts only as the special token, so
text that merely spells it changes nothing; from text, markers are found by spelling.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.events import (
    Answer,
    Event,
    EventKind,
    ParserOptions,
    accumulate,
    merge,
)
from deepinfer_jax.text.incremental import Detokenizer, Pattern, Scanner, check_stops
from deepinfer_jax.text.spellings import DSML, THINK_END
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.text.tools import strict_json


@dataclass
class _State:
    """What one state does with text and with the patterns it watches.

    `on_match[i]` runs when `scanner` finds its pattern i.
    """

    default: Callable[[str], None]
    scanner: Scanner
    on_match: tuple[Callable[[], None], ...] = field(default=())


class OutputParser:
    """Parses one output as it is generated.

    Every split of the same output gives the same events once neighbours are merged.

    Attributes:
        stopped: the stop string that was found, or None; the sequence must then end at once.
        reasoning_tokens: ids that were part of the reasoning (from ids only).
    """

    def __init__(self, options: ParserOptions, tokenizer: Tokenizer | None = None):
        """Parse ids of `tokenizer`, or text when it is None."""
        check_stops(options.stop)
        self.stopped: str | None = None
        self.reasoning_tokens = 0
        self._options = options
        self._tokenizer = tokenizer
        self._markers: dict[int, str] = {}
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._markers = {tokenizer.special(s): s for s in (DSML, THINK_END)}
            self._detokenizer = Detokenizer(tokenizer)
        self._events: list[Event] = []
        self._pending: list[str] = []
        self._drop_newlines = False
        self._skipped = False
        self._name = ""
        self._value = ""
        self._calls = 0
        self._parameters = 0
        self._states = self._build_states()
        self._state = "content"
        if options.starts_in_tool_calls:
            self._enter("calls")
        elif options.initial_stage in ("reasoning_start", "reasoning_continuation"):
            self._enter("reasoning", drop_newlines=options.initial_stage == "reasoning_start")
        else:
            self._enter_content(drop_newlines=options.initial_stage is None)

    def push_ids(self, ids: Iterable[int]) -> list[Event]:
        """Events of the next generated ids (without the final EOS)."""
        if self._detokenizer is None:
            raise RequestError(
                "The output parser got token ids, but it was made without a tokenizer.",
                "Ids have no text without one.",
                "Pass the tokenizer when making the parser, or push text.",
            )
        for token_id in ids:
            in_reasoning = self._state == "reasoning"
            marker = self._markers.get(token_id)
            if marker is None:
                self._feed(self._detokenizer.push([token_id]))
            else:
                self._feed(self._detokenizer.finish())
                self._step(marker)
            self.reasoning_tokens += in_reasoning and self._state == "reasoning"
        return self._take_events()

    def push_text(self, text: str) -> list[Event]:
        """Events of the next piece of text."""
        if self._detokenizer is not None:
            raise RequestError(
                f"The output parser got {len(text)} characters of text, but it reads token ids.",
                "A marker in text cannot be told from a special token.",
                "Push ids, or make the parser without a tokenizer.",
            )
        self._feed(text)
        return self._take_events()

    def finish(self, reason: str = "stop") -> list[Event]:
        """Events of the text held back, and the finish event.

        `reason` is why generation ended; "stop" becomes "tool_calls" when a call was begun.
        """
        if self._detokenizer is not None:
            self._feed(self._detokenizer.finish())
        self._flush(len(self._pending))
        if self.stopped is not None:
            reason = "stop"
        elif reason == "stop" and self._calls:
            reason = "tool_calls"
        self._emit("finish", reason)
        return self._take_events(final=True)

    def _feed(self, text: str) -> None:
        state = self._states[self._state]
        if not self._drop_newlines and state.scanner.passes(text):
            self._flush(len(self._pending))
            state.default(text)
            return
        for symbol in text:
            self._step(symbol)

    def _step(self, symbol: str) -> None:
        if self._drop_newlines:
            if symbol == "\n":
                return
            self._drop_newlines = False
        state = self._states[self._state]
        self._pending.append(symbol)
        found = state.scanner.step(symbol)
        if found is not None:
            index, length = found
            self._flush(len(self._pending) - length)
            self._pending.clear()
            state.on_match[index]()

    def _flush(self, count: int) -> None:
        """Give the first `count` held symbols the state's default action."""
        if count > 0:
            text = "".join(self._pending[:count])
            del self._pending[:count]
            self._states[self._state].default(text)

    def _take_events(self, final: bool = False) -> list[Event]:
        if not final:
            self._flush(len(self._pending) - self._states[self._state].scanner.held)
        events, self._events = merge(self._events), []
        return events

    def _emit(self, kind: EventKind, text: str, index: int | None = None) -> None:
        if text or kind == "tool_begin":
            self._events.append(Event(kind, text, index))

    def _enter(self, state: str, drop_newlines: bool = False) -> None:
        self._state = state
        self._drop_newlines = drop_newlines
        self._skipped = False
        self._states[state].scanner.reset()

    def _enter_content(self, drop_newlines: bool) -> None:
        json_mode = self._options.parse_json_output
        self._enter("json_wanted" if json_mode else "content", drop_newlines)

    def _build_states(self) -> dict[str, _State]:
        """The state table: for each state its default action, and patterns by priority."""
        to = self._enter
        by_id = self._tokenizer is not None
        dsml = (DSML,) if by_id else tuple(DSML)
        think_end = (THINK_END,) if by_id else tuple(THINK_END)
        close = ("<", "/", *dsml)
        to_calls = (Pattern(("<", *dsml), newlines_before=True), lambda: to("calls"))
        calls = [to_calls] if self._options.parse_tool_calls else []
        swallow = (Pattern(think_end), lambda: self._enter_content(False))
        stops = [
            (Pattern(tuple(stop)), lambda stop=stop: self._stop(stop))
            for stop in self._options.stop
        ]
        table: dict[str, tuple[Callable[[str], None], list[tuple[Pattern, Callable[[], None]]]]] = {
            "reasoning": (
                lambda text: self._emit("reasoning", text),
                [*calls, (Pattern(think_end, True), lambda: self._enter_content(True))],
            ),
            "content": (
                lambda text: self._emit("content", text),
                [*stops, *calls, swallow],
            ),
            "json_wanted": (
                self._skip,
                [
                    (_literal("```json\n"), lambda: to("json")),
                    (_literal("```\n"), lambda: to("json")),
                    (_literal("{"), lambda: self._open_json("{")),
                    (_literal("["), lambda: self._open_json("[")),
                    *calls,
                    swallow,
                ],
            ),
            "json": (
                lambda text: self._emit("content", text),
                [*stops, (_literal("\n```"), lambda: to("json_done"))],
            ),
            "json_done": (self._skip, calls),
            "calls": (
                _drop,
                [
                    (_literal('invoke name="'), self._open_name),
                    (Pattern((*close, *" calls>")), lambda: to("end")),
                    (Pattern((*close, *"tool_calls>")), lambda: to("end")),
                ],
            ),
            "name": (self._collect_name, [(_literal('"'), self._begin_call)]),
            "arguments": (
                _drop,
                [
                    (_literal('parameter name="'), self._open_parameter),
                    (Pattern(close), self._end_call),
                ],
            ),
            "parameter_name": (
                lambda text: self._arguments(_escape(text)),
                [(_literal('"'), lambda: self._arguments('": ', "parameter_type"))],
            ),
            "parameter_type": (
                _drop,
                [
                    (_literal('true">'), lambda: self._arguments('"', "string_value")),
                    (_literal('false">'), lambda: to("json_value")),
                    (_literal(">"), self._open_untyped),
                ],
            ),
            "string_value": (
                lambda text: self._arguments(_escape(text)),
                [(Pattern(close), lambda: self._arguments('"', "arguments"))],
            ),
            "json_value": (self._arguments, [(Pattern(close), lambda: to("arguments"))]),
            "untyped_value": (self._collect_value, [(Pattern(close), self._close_untyped)]),
            "end": (_drop, []),
        }
        return {
            name: _State(default, Scanner([p for p, _ in rows]), tuple(act for _, act in rows))
            for name, (default, rows) in table.items()
        }

    def _stop(self, stop: str) -> None:
        self.stopped = stop
        self._enter("end")

    def _skip(self, text: str) -> None:
        """Text around the JSON answer: one space for each stretch, however it is split."""
        if text and not self._skipped:
            self._emit("content", " ")
            self._skipped = True

    def _open_json(self, bracket: str) -> None:
        self._emit("content", bracket)
        self._enter("json")

    def _open_name(self) -> None:
        self._name = ""
        self._enter("name")

    def _collect_name(self, text: str) -> None:
        self._name += text

    def _begin_call(self) -> None:
        self._emit("tool_begin", self._name, self._calls)
        self._calls += 1
        self._parameters = 0
        self._enter("arguments")

    def _end_call(self) -> None:
        self._arguments("}" if self._parameters else "{}", "calls")

    def _open_parameter(self) -> None:
        self._arguments(', "' if self._parameters else '{"', "parameter_name")
        self._parameters += 1

    def _arguments(self, text: str, next_state: str | None = None) -> None:
        self._emit("tool_args", text, self._calls - 1)
        if next_state is not None:
            self._enter(next_state)

    def _open_untyped(self) -> None:
        self._value = ""
        self._enter("untyped_value")

    def _collect_value(self, text: str) -> None:
        self._value += text

    def _close_untyped(self) -> None:
        """A parameter without its string attribute: JSON if the value is JSON, else text."""
        try:
            strict_json(self._value)
            text = self._value
        except ValueError:
            text = f'"{_escape(self._value)}"'
        self._arguments(text, "arguments")


def parse_ids(
    ids: Iterable[int], options: ParserOptions, tokenizer: Tokenizer, finish: str = "stop"
) -> Answer:
    """Parse a whole output given as token ids (without the final EOS)."""
    parser = OutputParser(options, tokenizer)
    return accumulate([*parser.push_ids(ids), *parser.finish(finish)])


def _literal(text: str) -> Pattern:
    return Pattern(tuple(text))


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _drop(text: str) -> None:
    del text
