"""Chat prompts: from Chat-Completions messages to the pieces of a V4.1 prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text import history, spellings
from deepinfer_jax.text.events import ParserOptions, Stage
from deepinfer_jax.text.history import ImageReference, Turn
from deepinfer_jax.text.options import parse_response_format, resolve_thinking
from deepinfer_jax.text.tokenizer import Piece
from deepinfer_jax.text.tools import (
    calls_text,
    choose_tools,
    open_calls,
    parse_tools,
    tools_text,
)

__all__ = ["ImageReference", "Piece", "Rendered", "render"]


@dataclass(frozen=True)
class Rendered:
    """A prompt, and how to read the answer to it.

    Attributes:
        pieces: the prompt; special pieces are single tokens, plain ones never are.
        images: the images in the order of their placeholders.
        parsing: options for the output parser (without the request's stop strings).
        thinking: whether the model thinks.
        effort: reasoning effort 1..100, or None when it does not think.
    """

    pieces: tuple[Piece, ...]
    images: tuple[ImageReference, ...]
    parsing: ParserOptions
    thinking: bool
    effort: int | None

    @property
    def text(self) -> str:
        """The whole prompt as one string; only for people, it cannot be encoded safely."""
        return "".join(p.text for p in self.pieces)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = True,
    effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    task: str | None = None,
    continue_final_message: bool = False,
    add_generation_prompt: bool = True,
    keep_turn_reasoning: bool = False,
    check_history: bool = True,
) -> Rendered:
    """Render a conversation as the prompt that the V4.1 models were trained on.

    Args:
        messages: Chat-Completions messages: `role` (system or developer, user, assistant, tool,
            latest_reminder), `content` (a string or parts of type text and image_url), and
            `reasoning_content`, `tool_calls`, `tool_call_id`, `prefix`, `task` where they apply;
            a system message may declare `tools` of its own. Unknown keys are ignored, as the
            protocol does.
        thinking: whether the model thinks; None leaves it to `effort`.
        effort: none, minimal, low, medium, high, xhigh, max, ultra, or 1..100.
        tools: function declarations, printed in the first system message.
        tool_choice: auto, none, required, or a named function.
        response_format: text, json_object or json_schema; the latter two are written into the
            prompt and not enforced.
        task: quick-instruction task of the last user message.
        continue_final_message: continue the last assistant message (as its `prefix: true`).
        add_generation_prompt: end in the header that the model answers after. False gives a
            finished conversation, in which the last assistant message counts as the answer.
        keep_turn_reasoning: also render the reasoning after the last user message when no tools
            are declared, as the checkpoint's own encoder does.
        check_history: require that tool results and tool calls match.

    Raises RequestError, naming the message and field, for a conversation that cannot be rendered.
    """
    on, level = resolve_thinking(thinking, effort)
    chosen, forced = choose_tools(parse_tools(tools), tool_choice)
    answer_format = parse_response_format(response_format)
    turns = history.parse_messages(
        messages,
        task=task,
        continue_final=continue_final_message,
        check_calls=check_history,
        open_end=not add_generation_prompt,
    )
    if answer_format.kind == "json_object" and not history.mentions_json(turns):
        raise RequestError(
            f"response_format is json_object, but none of the {len(turns)} messages has the word "
            "'json'.",
            "A model that is not told to write JSON may fill the answer with blanks.",
            "Ask for JSON in a message.",
        )
    _check_forced(forced, on, turns)
    extra = [list(tools_text(chosen))] if chosen else []
    if (instruction := answer_format.instruction) is not None:
        extra.append([Piece(instruction)])
    turns = history.normalise(turns, system_first=bool(extra))
    has_tools = bool(chosen) or any(t.tools for t in turns)
    writer = _Writer(on, on and has_tools, keep_turn_reasoning, turns, add_generation_prompt)
    writer.write(level if on else None, extra)
    if forced:
        writer.pieces += open_calls()
    parsing = ParserOptions(
        initial_stage=_stage(turns[-1], on, writer.in_reasoning),
        parse_tool_calls=has_tools and not _is_plain(turns, on),
        starts_in_tool_calls=forced,
        parse_json_output=answer_format.kind == "json_object",
    )
    return Rendered(
        pieces=tuple(p for p in writer.pieces if p.text),
        images=tuple(writer.images),
        parsing=parsing,
        thinking=on,
        effort=level if on else None,
    )


@dataclass
class _Writer:
    """Writes the turns of one prompt; `pieces` and `images` grow in prompt order.

    `in_reasoning`: what was written last is inside the reasoning of an assistant turn.
    """

    thinking: bool
    keep: bool
    keep_turn: bool
    turns: Sequence[Turn]
    open_answer: bool
    pieces: list[Piece] = field(default_factory=list)
    images: list[ImageReference] = field(default_factory=list)
    in_reasoning: bool = False

    def write(self, effort: int | None, extra: Sequence[Sequence[Piece]]) -> None:
        self._special(spellings.BOS)
        if effort is not None:
            self._special(spellings.SYSTEM)
            self._plain(
                f"Reasoning Effort: {effort} (range 1-100, the higher the value, "
                "the more thorough the reasoning)\n\n"
            )
        turns = self.turns
        last_user = max((i for i, t in enumerate(turns) if t.is_real_user), default=-1)
        for i, turn in enumerate(turns):
            match turn.role:
                case "system":
                    if i > 0 or effort is None:
                        self._special(spellings.SYSTEM)
                    self._content(turn)
                    own = [list(tools_text(turn.tools))] if turn.tools else []
                    for pieces in [*own, *(extra if i == 0 else ())]:
                        self._plain("\n\n")
                        self.pieces += pieces
                case "user":
                    self._special(spellings.USER)
                    self._content(turn)
                case "latest_reminder":
                    self._special(spellings.REMINDER)
                    self._content(turn)
                case _:
                    self._assistant(i, self.keep_turn and i > last_user)
        if self.open_answer and not turns[-1].prefix:
            self.in_reasoning = self._header(turns[-1], generation=True)

    def _assistant(self, index: int, in_last_turn: bool) -> None:
        turn = self.turns[index]
        before = self.turns[index - 1] if index else None
        final = index == len(self.turns) - 1
        answer = final and (index > 0 if turn.prefix else not self.open_answer)
        thinks = self._header(before, generation=answer or in_last_turn)
        if thinks and (before is None or before.task is None):
            self._plain(turn.reasoning or "")
            self.in_reasoning = turn.prefix and turn.is_empty
            if not self.in_reasoning:
                self._special(spellings.THINK_END)
        self._content(turn)
        if turn.calls:
            self.pieces += calls_text(turn.calls)
        if not turn.prefix:
            self._special(spellings.EOS)

    def _header(self, before: Turn | None, *, generation: bool) -> bool:
        """Write an assistant header, or a task's token; True when it opened the reasoning."""
        task = before.task if before else None
        if task not in (None, "action"):
            self._special(spellings.TASKS[task])
            return False
        thinks = self.thinking and (self.keep or generation)
        self._special(spellings.ASSISTANT)
        self._special(spellings.THINK if thinks else spellings.THINK_END)
        if task == "action":
            self._special(spellings.TASKS["action"])
        return thinks

    def _content(self, turn: Turn) -> None:
        for i, block in enumerate(turn.blocks):
            if i:
                self._plain("\n\n")
            self.pieces += block.pieces
            self.images += block.images

    def _plain(self, text: str) -> None:
        self.pieces.append(Piece(text))

    def _special(self, spelling: str) -> None:
        self.pieces.append(Piece(spelling, special=True))


def _check_forced(forced: bool, thinking: bool, turns: Sequence[Turn]) -> None:
    if not forced:
        return
    last = turns[-1]
    clash = None
    if thinking:
        clash = "thinking is on"
    elif last.prefix:
        clash = "the last message is a prefix to continue"
    elif last.task is not None:
        clash = f"the last message carries the task {last.task!r}"
    if clash is not None:
        raise RequestError(
            f"tool_choice forces a call, but {clash}.",
            "A forced call starts right after the assistant header, where this prompt continues "
            "otherwise.",
            "Use tool_choice 'auto', or drop the other option.",
        )


def _is_plain(turns: Sequence[Turn], thinking: bool) -> bool:
    """The answer to come is a task's: plain text, except of an action in thinking mode."""
    task = turns[-1].task
    return task is not None and not (task == "action" and thinking)


def _stage(last: Turn, thinking: bool, in_reasoning: bool) -> Stage | None:
    """Where the output begins, given whether the prompt ends inside the reasoning."""
    if not thinking:
        return None
    if last.prefix:
        if not in_reasoning:
            return "content_continuation"
        return "reasoning_continuation" if last.reasoning else "reasoning_start"
    return "reasoning_start" if in_reasoning else None
