"""Log-probs in response bodies, and which tokens made which text of a chat answer."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from deepinfer_jax.request import CompletionOutput
from deepinfer_jax.text.events import Event
from deepinfer_jax.text.incremental import Detokenizer
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.spellings import THINK_END
from deepinfer_jax.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON cannot carry


def chat_logprobs(
    ids: Sequence[int], sample: CompletionOutput, parser: OutputParser, tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """The `logprobs` member of a chat choice: entries of the tokens that made visible text.

    Tokens of markers and tool calls have no entry; one that a stop string cut has. A member
    without entries is left out, and None is given when there is no entry at all.

    Args:
        ids: the answer's tokens without the one that ended it.
        sample: its log-probs must be there.
        parser: new, with the options that the answer was read with; it is used up.
        tokenizer: of the ids.
    """
    members = {"content": "content", "reasoning": "reasoning_content"}
    found: dict[str, Any] = {}
    for kind, place in attribute(ids, parser, tokenizer):
        entry = _entry(ids[place], place, sample, tokenizer)
        found.setdefault(members[kind], []).append(entry)
    return found or None


def completion_logprobs(
    ids: Sequence[int], sample: CompletionOutput, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The `logprobs` member of a text completion: lists by token.

    `text_offset` counts characters of the choice's text, where a token's first whole character
    begins. Tokens that lie wholly in a stop string, which the text does not show, are left out.
    """
    logprobs = sample.logprobs
    assert logprobs is not None, "asked for"
    detokenizer, offsets, length = Detokenizer(tokenizer), list[int](), 0
    for token_id in ids:
        if isinstance(sample.stop_reason, str) and length >= len(sample.text):
            break
        offsets.append(length)
        length += len(detokenizer.push([token_id]))
    count = len(offsets)
    tops = zip(logprobs.top_ids[:count], logprobs.top[:count], strict=True)
    return {
        "tokens": [token_text(tokenizer, i) for i in ids[:count]],
        "token_logprobs": [_finite(logprob) for logprob in logprobs.token[:count]],
        "top_logprobs": [
            {token_text(tokenizer, int(i)): _finite(p) for i, p in zip(*row, strict=True)}
            for row in tops
        ],
        "text_offset": offsets,
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token's text; bytes that are no whole character are written as `\xNN`."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")


def attribute(
    ids: Sequence[int], parser: OutputParser, tokenizer: Tokenizer
) -> Iterator[tuple[str, int]]:
    """(content or reasoning, place among `ids`) of each token that contributed visible text.

    A token is counted where its first text stands. The parser shows text in the order of the
    tokens and only ever leaves some out, so the next visible character is the next one of the
    tokens' text that equals it.
    """
    detokenizer, unfinished = Detokenizer(tokenizer), list[int]()
    queue: deque[tuple[str, list[int]]] = deque()
    told: set[int] = set()
    think_end = tokenizer.special(THINK_END)

    def read(text: str) -> None:
        nonlocal unfinished
        if text:
            # The first character may have begun in earlier tokens; the last token made the rest.
            queue.append((text[0], unfinished))
            queue.extend((character, unfinished[-1:]) for character in text[1:])
            unfinished = []

    def visible(events: Sequence[Event]) -> Iterator[tuple[str, int]]:
        for event in events:
            if event.kind not in ("content", "reasoning"):
                continue
            for character in event.text:
                for place in _makers(queue, character):
                    if place not in told:
                        told.add(place)
                        yield event.kind, place

    for place, token_id in enumerate(ids):
        unfinished.append(place)
        read(detokenizer.push([token_id]))
        yield from visible(parser.push_ids([token_id]))
        if token_id == think_end:
            queue.clear()  # nothing is held across this marker, so the rest was left out
    read(detokenizer.finish())
    yield from visible(parser.finish())


def _makers(queue: deque[tuple[str, list[int]]], character: str) -> list[int]:
    """The tokens that made the visible `character`; what stands before it was left out."""
    found = next((i for i, (other, _) in enumerate(queue) if other == character), None)
    if found is None:
        # A blank that stands for text around a JSON answer: made by that text's first token.
        return queue[0][1] if queue else []
    for _ in range(found):
        queue.popleft()
    return queue.popleft()[1]


def _entry(
    token_id: int, place: int, sample: CompletionOutput, tokenizer: Tokenizer
) -> dict[str, Any]:
    logprobs = sample.logprobs
    assert logprobs is not None, "asked for"
    tops = zip(logprobs.top_ids[place], logprobs.top[place], strict=True)
    return _token(token_id, logprobs.token[place], tokenizer) | {
        "top_logprobs": [_token(int(i), p, tokenizer) for i, p in tops]
    }


def _token(token_id: int, logprob: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: Any) -> float:
    return max(float(logprob), LEAST)
