"""Messages of a conversation: parsing, checks, and the merging and sorting before rendering."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text import spellings
from deepinfer_jax.text.tokenizer import Piece
from deepinfer_jax.text.tools import Tool, parse_tools

_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")


@dataclass(frozen=True)
class ImageReference:
    """An image as the request names it; nothing is loaded.

    Attributes:
        url: a data: URL or an address.
        detail: requested detail: low, high, original or auto.
        message: index of its message in the request.
    """

    url: str
    detail: str
    message: int


@dataclass(frozen=True)
class Block:
    """A stretch of one message's content: pieces with their images.

    `call_id` is set, maybe empty, when the block is the result of a tool call.
    """

    pieces: tuple[Piece, ...]
    images: tuple[ImageReference, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True)
class Turn:
    """One message after parsing; tool results are user turns."""

    role: str
    blocks: tuple[Block, ...]
    reasoning: str | None = None
    calls: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Tool, ...] = ()
    prefix: bool = False
    task: str | None = None

    @property
    def is_empty(self) -> bool:
        """The content is empty."""
        return not any(piece.text for block in self.blocks for piece in block.pieces)

    @property
    def is_real_user(self) -> bool:
        """The turn holds a message of the user, not only tool results."""
        return self.role == "user" and any(b.call_id is None for b in self.blocks)


def parse_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    task: str | None = None,
    continue_final: bool = False,
    check_calls: bool = True,
    open_end: bool = False,
) -> list[Turn]:
    """Parse and check messages, one turn each, in order.

    `task` is given to the last user message and `continue_final` makes the last message a prefix.
    `check_calls` requires each call to be answered by the tool messages right after it; with
    `open_end` the last assistant message's calls may be unanswered. Raises RequestError.
    """
    if not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {messages!r}.",
            "A conversation is a list of messages.",
            'Pass a list such as [{"role": "user", "content": "Hello"}].',
        )
    if not messages:
        raise RequestError(
            "The conversation has 0 messages.",
            "The model answers a message, so there must be one.",
            "Pass at least one message.",
        )
    turns = [_parse_message(i, message) for i, message in enumerate(messages)]
    last = len(turns) - 1
    if continue_final:
        if turns[last].role != "assistant":
            raise RequestError(
                f"continue_final_message is set, but the last message has the role "
                f"{turns[last].role!r}.",
                "Only an assistant message can be continued.",
                "End with an assistant message, or drop the option.",
            )
        turns[last] = replace(turns[last], prefix=True)
    for i, turn in enumerate(turns):
        if turn.prefix and (i != last or turn.role != "assistant" or turn.calls):
            raise RequestError(
                f"messages[{i}] ({turn.role}) of {last + 1} has prefix set.",
                "Only the last message can be continued, and only an assistant's without calls.",
                "Remove prefix, or make it the last message.",
            )
    if task is not None:
        users = [i for i, t in enumerate(turns) if t.is_real_user]
        if users:
            turns[users[-1]] = replace(turns[users[-1]], task=task)
    _check_tasks(turns, task)
    if check_calls:
        _check_calls(turns, messages, open_end)
    return turns


def mentions_json(turns: Sequence[Turn]) -> bool:
    """Some message's content has the word json, in any case."""
    return any(
        "json" in piece.text.lower() for t in turns for block in t.blocks for piece in block.pieces
    )


def normalise(turns: Sequence[Turn], *, system_first: bool) -> list[Turn]:
    """Merge user turns, sort tool results by their calls, drop repeated reminders.

    Empty system turns are dropped first. `system_first` puts an empty system turn at the start
    when there is none, to carry the tools and the response format.
    """
    said = [t for t in turns if t.role != "system" or not t.is_empty or t.tools]
    merged: list[Turn] = []
    for turn in said or turns[:1]:
        previous = merged[-1] if merged else None
        if turn.role == "latest_reminder" and previous and previous.role == turn.role:
            continue
        if turn.role == "user" and previous and previous.role == "user" and previous.task is None:
            merged[-1] = replace(turn, blocks=previous.blocks + turn.blocks)
        else:
            merged.append(turn)
    order: dict[str, int] = {}
    for i, turn in enumerate(merged):
        if turn.calls:
            order = {str(call.get("id")): k for k, call in enumerate(turn.calls)}
        if turn.role == "user":
            merged[i] = replace(turn, blocks=_sort_results(turn.blocks, order))
    if system_first and merged[0].role != "system":
        merged.insert(0, Turn("system", ()))
    return merged


def _sort_results(blocks: tuple[Block, ...], order: Mapping[str, int]) -> tuple[Block, ...]:
    """Put tool results in their calls' order; other blocks keep their places."""
    results = sorted(
        (b for b in blocks if b.call_id is not None), key=lambda b: order.get(b.call_id or "", 0)
    )
    queue = iter(results)
    return tuple(b if b.call_id is None else next(queue) for b in blocks)


def _parse_message(index: int, message: Mapping[str, Any]) -> Turn:
    role = message.get("role") if isinstance(message, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise RequestError(
            f"messages[{index}] has the role {role!r}.",
            f"A message is an object whose role is one of {', '.join(_ROLES)} or developer.",
            "Use one of these roles.",
        )
    calls = _calls(index, message) if role == "assistant" else ()
    content = message.get("content")
    if content is None and calls:
        content = ""
    block = Block(*_content(index, role, content))
    if role == "tool":
        pieces = (Piece("<tool_result>"), *block.pieces, Piece("</tool_result>"))
        result = Block(pieces, block.images, str(message.get("tool_call_id") or ""))
        return Turn("user", (result,), prefix=bool(message.get("prefix")))
    return Turn(
        role,
        (block,),
        reasoning=_reasoning(index, message) if role == "assistant" else None,
        calls=calls,
        tools=parse_tools(message.get("tools") or ()) if role == "system" else (),
        prefix=bool(message.get("prefix")),
        task=message.get("task"),
    )


def _calls(index: int, message: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
        raise RequestError(
            f"messages[{index}].tool_calls is {calls!r}.",
            "It is a list of calls, each an object with id and function.",
            "Pass the calls as the model's answer gave them.",
        )
    return tuple(calls)


def _reasoning(index: int, message: Mapping[str, Any]) -> str | None:
    given = [message.get(key) for key in ("reasoning_content", "reasoning")]
    texts = [text for text in given if text is not None]
    if not all(isinstance(text, str) for text in texts) or len(set(texts)) > 1:
        raise RequestError(
            f"messages[{index}] has reasoning_content {given[0]!r} and reasoning {given[1]!r}.",
            "The reasoning is one string; the second name is an alias of the first.",
            "Pass reasoning_content only.",
        )
    return texts[0] if texts else None


def _content(
    index: int, role: str, content: object
) -> tuple[tuple[Piece, ...], tuple[ImageReference, ...]]:
    if isinstance(content, str):
        return (Piece(content),), ()
    if not isinstance(content, Sequence):
        raise RequestError(
            f"messages[{index}].content is {content!r}.",
            "Content is a string or a list of parts; only an assistant message with tool_calls "
            "may leave it out.",
            "Pass a string; an empty one is allowed.",
        )
    pieces: list[Piece] = []
    images: list[ImageReference] = []
    for k, part in enumerate(content):
        if k:
            pieces.append(Piece("\n\n"))
        text, image = _part(f"messages[{index}].content[{k}]", index, role, part)
        pieces.append(text)
        images += [image] if image else []
    return tuple(pieces), tuple(images)


def _part(where: str, index: int, role: str, part: object) -> tuple[Piece, ImageReference | None]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return Piece(part["text"]), None
    source = part.get("image_url") if isinstance(part, Mapping) and kind == "image_url" else None
    source = {"url": source} if isinstance(source, str) else source
    if isinstance(source, Mapping) and isinstance(source.get("url"), str):
        detail = source.get("detail") or "high"
        if detail not in ("low", "high", "original", "auto"):
            raise RequestError(
                f"{where} asks for the image detail {detail!r}.",
                "The detail is low, high, original or auto.",
                "Use one of these, or leave it out.",
            )
        if role not in ("assistant", "latest_reminder"):
            image = ImageReference(source["url"], detail, index)
            return Piece(spellings.IMAGE, special=True), image
        raise RequestError(
            f"{where} is an image in a message of the role {role!r}.",
            "Only system, user and tool messages can hold images.",
            "Move the image to a user message.",
        )
    raise RequestError(
        f"{where} is {part!r}.",
        "A part is {'type': 'text', 'text': ...} or {'type': 'image_url', 'image_url': "
        "{'url': ...}}.",
        "Use one of these forms.",
    )


def _check_tasks(turns: Sequence[Turn], asked: str | None) -> None:
    tasks = [(i, t.task) for i, t in enumerate(turns) if t.task is not None]
    if asked is not None and not tasks:
        raise RequestError(
            f"The task {asked!r} is asked for, but the {len(turns)} messages have none of a user.",
            "A quick-instruction task belongs to the last user message.",
            "Add a user message, or drop the task.",
        )
    last_user = max((i for i, t in enumerate(turns) if t.role == "user"), default=-1)
    for i, name in tasks:
        if not isinstance(name, str) or name not in spellings.TASKS:
            raise RequestError(
                f"messages[{i}] carries the task {name!r}.",
                f"The quick-instruction tasks are {', '.join(spellings.TASKS)}.",
                "Use one of these, or none.",
            )
        follower = turns[i + 1].role if i + 1 < len(turns) else "assistant"
        if i != last_user or not turns[i].is_real_user or follower != "assistant":
            raise RequestError(
                f"messages[{i}] ({turns[i].role}) of {len(turns)} carries the task {name!r}.",
                "Only the last user message can carry one, and only its answer can follow.",
                "Remove the task, or the messages after it.",
            )


def _check_calls(
    turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], open_end: bool
) -> None:
    """Each call is answered by one of the tool messages right after it, and nothing else is."""
    waiting: list[str] = []
    for i, turn in enumerate(turns):
        if messages[i].get("role") == "tool":
            call_id = turn.blocks[0].call_id or ""
            if call_id not in waiting:
                raise RequestError(
                    f"messages[{i}] answers the call {call_id!r}; unanswered calls before it: "
                    f"{', '.join(map(repr, waiting)) or 'none'}.",
                    "A tool message must answer a call of the preceding assistant message.",
                    "Give it the call's id as tool_call_id, once.",
                )
            waiting.remove(call_id)
            continue
        _refuse_unanswered(waiting, f"before messages[{i}]")
        waiting = [str(call.get("id")) for call in turn.calls]
        if len(set(waiting)) < len(waiting) or "None" in waiting:
            raise RequestError(
                f"messages[{i}].tool_calls has the ids {', '.join(waiting)}.",
                "Results are matched to calls by id, so each call needs one of its own.",
                "Give every call a different id.",
            )
    if not open_end:
        _refuse_unanswered(waiting, "at the end")


def _refuse_unanswered(waiting: Sequence[str], where: str) -> None:
    if waiting:
        raise RequestError(
            f"{len(waiting)} tool calls are unanswered {where}: {', '.join(waiting)}.",
            "An assistant message with tool_calls must be followed by tool messages that answer "
            "each of them.",
            "Add the missing tool messages.",
        )
