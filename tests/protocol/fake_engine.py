"""Engine results without a network."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from deepinfer_jax.errors import RequestError
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs
from deepinfer_jax.settings import package_folder
from deepinfer_jax.text.chat import render
from deepinfer_jax.text.events import ParserOptions
from deepinfer_jax.text.parse import OutputParser, parse_ids
from deepinfer_jax.text.tokenizer import Tokenizer

SERVED = {"MODEL"}


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(package_folder("models")) / "tiny_tokenizer")


def logprobs(ids: Sequence[int], top: int) -> TokenLogprobs:
    """-1, -2, ... for the tokens; the likeliest are the token and those with smaller ids."""
    count = len(ids)
    values = -1 - np.arange(count, dtype=np.float32)
    below = np.arange(top, dtype=np.float32)
    return TokenLogprobs(
        token=values,
        top_ids=np.asarray(ids, np.int32).reshape(count, 1) - np.arange(top, dtype=np.int32),
        top=values.reshape(count, 1) - below,
    )


def sample_of(
    ids: Sequence[int],
    tokenizer: Tokenizer,
    parsing: ParserOptions | None = None,
    *,
    finish: str = "stop",
    top: int | None = None,
    index: int = 0,
    end: Sequence[int] = (),
) -> CompletionOutput:
    """A finished sample of `ids`, then `end`, read as a chat answer when `parsing` is given."""
    stop = None
    if parsing is None:
        text, reasoning, calls = tokenizer.decode(ids), None, ()
    else:
        answer = parse_ids(ids, parsing, tokenizer, finish)
        parser = OutputParser(parsing, tokenizer)
        parser.push_ids(ids)
        stop = parser.stopped
        text, calls = answer.content, answer.tool_calls
        reasoning = None if parsing.initial_stage is None else answer.reasoning
        finish = answer.finish_reason or finish
    whole = (*ids, *end)
    return CompletionOutput(
        index=index,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        token_ids=whole,
        finish_reason=finish,  # type: ignore[arg-type]
        stop_reason=stop,
        seq_seed=7 + index,
        logprobs=None if top is None else logprobs(whole, top),
    )


def output_of(
    *samples: CompletionOutput,
    prompt: Sequence[int] = (0, 1, 2),
    cached: int = 0,
    error: RequestError | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=tuple(prompt),
        outputs=samples,
        finished=True,
        error=error,
        metrics={"cached_tokens": cached},
    )


class FakeEngine:
    """Says a prompt backwards; the answers come last first within each group of `slots`."""

    def __init__(self, *, slots: int = 3, seconds: float = 0, on: Callable[[int], None] = id):
        self.tokenizer = tiny_tokenizer()
        self.asked: list[Ask] = []
        self._slots, self._seconds, self._on = slots, seconds, on

    def answer(self, asks: Iterable[Ask]) -> Iterator[tuple[int, RequestOutput]]:
        group: list[tuple[int, Ask]] = []
        for index, ask in enumerate(asks):
            self.asked.append(ask)
            group.append((index, ask))
            if len(group) == self._slots:
                yield from self._answered(group)
        yield from self._answered(group)

    def _answered(self, group: list[tuple[int, Ask]]) -> Iterator[tuple[int, RequestOutput]]:
        while group:
            index, ask = group.pop()
            time.sleep(self._seconds)
            self._on(index)
            yield index, self._one(ask)

    def _one(self, ask: Ask) -> RequestOutput:
        parsing = None
        if ask.messages is None:
            said = ask.prompt if isinstance(ask.prompt, str) else repr(ask.prompt)
        else:
            said = ask.messages[-1]["content"]
            parsing = render(ask.messages, **ask.options).parsing
        assert isinstance(said, str)
        prompt = self.tokenizer.encode(said)
        if "too long" in said:
            error = RequestError(f"{ask.name}: prompt 9 exceeds 8.", "It does.", "Shorten it.")
            return output_of(prompt=prompt, error=error)
        ids = self.tokenizer.encode(said[::-1], add_bos=False)
        if parsing is not None and parsing.initial_stage is not None:
            ids = [*ids[:1], self.tokenizer.special("</think>"), *ids[1:]]
        samples = [
            sample_of(
                ids,
                self.tokenizer,
                parsing,
                top=int(ask.params.logprobs) if ask.params.logprobs is not None else None,
                index=i,
                end=[self.tokenizer.eos_id],
            )
            for i in range(ask.params.n)
        ]
        return output_of(*samples, prompt=prompt)
