"""Requests at the door: prompts become token ids and samples, or carry the reason why they cannot.

A bad prompt never stops the others: its request keeps its place and its error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.engine.sequence import Sequence as Sample
from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.protocol.ask import Ask
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs
from deepinfer_jax.sampling_params import SamplingParams, draw_seed, sample_seed
from deepinfer_jax.text.chat import render
from deepinfer_jax.text.output import ChatText, OutputText, PlainText
from deepinfer_jax.text.tokenizer import Tokenizer

Truncate = Literal["error", "left", "right"]
Encoded = tuple[Sequence[int], Callable[[SamplingParams], OutputText]]


@dataclass
class Request:
    """A prompt on its way.

    Attributes:
        request_id: its place among the prompts, as text.
        prompt: its text, None if it was given as ids or messages.
        ids: the prompt as the model sees it.
        truncated: tokens of the prompt that were cut off.
        samples: its sequences; empty when it cannot run.
        error: why it cannot run, or None.
        started, first_token: seconds on the performance counter.
    """

    request_id: str
    prompt: str | None
    ids: tuple[int, ...] = ()
    truncated: int = 0
    samples: list[Sample] = field(default_factory=list)
    error: DeepInferError | None = None
    started: float = 0.0
    first_token: float | None = None
    _told_prompt: bool = False  # `news` has given the prompt's log-probs away

    def output(self, mode: str) -> RequestOutput:
        """All that it has produced; `mode` names the distribution of the log-probs."""
        return self._made((s.completion(mode) for s in self.samples), self._scored(mode))

    def news(self, stepped: Iterable[Sample], mode: str) -> RequestOutput:
        """What its samples `stepped` have produced since they were last among them."""
        scored = None if self._told_prompt else self._scored(mode)
        self._told_prompt |= scored is not None
        return self._made((s.news(mode) for s in stepped), scored)

    def _scored(self, mode: str) -> TokenLogprobs | None:
        """Of the prompt, which is run for all samples but scored once."""
        return self.samples[0].prompt_logprobs(mode) if self.samples else None

    def _made(
        self, outputs: Iterable[CompletionOutput], scored: TokenLogprobs | None
    ) -> RequestOutput:
        failed = next((s.error for s in self.samples if s.error is not None), None)
        metrics: dict[str, float] = {}
        if self.truncated:
            metrics["truncated_tokens"] = self.truncated
        if self.first_token is not None:
            metrics["time_to_first_token_s"] = self.first_token - self.started
            metrics["cached_tokens"] = self.samples[0].cached
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.ids,
            outputs=tuple(outputs),
            finished=all(s.finished for s in self.samples),
            error=self.error or failed,
            prompt_logprobs=scored,
            metrics=metrics,
        )


@dataclass(frozen=True)
class Admission:
    """Turns what a caller passes into requests.

    Attributes:
        tokenizer, config: the model's.
        limit: longest prompt and output together, in tokens.
        truncate: what becomes of a prompt that leaves no room for its max_tokens: it is an error,
            or tokens are cut off; such a request has `metrics["truncated_tokens"]`.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    limit: int
    truncate: Truncate = "error"

    def prompts(
        self, prompts: Any, params: Any, token_ids: Any, multi_modal_data: Any
    ) -> list[Request]:
        """Requests of texts or token ids, in order. Raises RequestError if lengths disagree."""
        pairs = _pairs(prompts, token_ids)
        images = _images(multi_modal_data, len(pairs))
        requests = []
        chosen = _one_each(params, len(pairs))
        for number, ((text, ids), p, image) in enumerate(zip(pairs, chosen, images, strict=True)):
            encode = self._plain_encoder(number, text, ids, image)
            requests.append(self._admit(number, text, p, encode))
        return requests

    def chats(
        self,
        messages: Sequence[Any],
        params: Any,
        options: Mapping[str, Any],
    ) -> list[Request]:
        """Requests of one conversation, or of several; `options` are those of the renderer."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages is of type {type(messages).__name__}.",
                "A conversation is a list of messages.",
                'Pass a list such as [{"role": "user", "content": "Hello"}].',
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        chosen = _one_each(params, len(conversations))
        return [
            self._admit(
                number, None, p, self._chat_encoder(number, conversation, options), chat=True
            )
            for number, (conversation, p) in enumerate(zip(conversations, chosen, strict=True))
        ]

    def asks(self, asks: Iterable[Ask]) -> list[Request]:
        """Requests of a protocol's asks, in order; each is called by its own name in errors."""
        requests = []
        for number, ask in enumerate(asks):
            label = ask.name or f"{number}"
            if ask.messages is not None:
                encode = self._chat_encoder(label, ask.messages, ask.options)
            else:
                text = ask.prompt if isinstance(ask.prompt, str) else None
                encode = self._plain_encoder(
                    label, text, None if text is not None else ask.prompt, None
                )
            chat = ask.messages is not None
            requests.append(
                self._admit(number, None, ask.params, encode, label, ask.fitted, chat=chat)
            )
        return requests

    def of_ids(self, number: int, ids: Sequence[int], params: SamplingParams) -> Request:
        """The request of one prompt of token ids."""
        return self._admit(number, None, params, self._plain_encoder(number, None, ids, None))

    def _plain_encoder(
        self, number: int | str, text: str | None, ids: Any, image: Any
    ) -> Callable[[], Encoded]:
        def encode() -> Encoded:
            if image:
                raise _no_images(number)
            if ids is not None:
                encoded = as_ids(number, ids)
            elif text:
                encoded = self.tokenizer.encode(text)
            else:
                encoded = []
            return encoded, lambda p: PlainText(self.tokenizer, tuple(p.stop))

        return encode

    def _chat_encoder(
        self, number: int | str, conversation: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[[], Encoded]:
        def encode() -> Encoded:
            rendered = render(conversation, **options)
            if rendered.images:
                raise _no_images(number)

            def answer(p: SamplingParams) -> OutputText:
                return ChatText(self.tokenizer, replace(rendered.parsing, stop=tuple(p.stop)))

            return self.tokenizer.encode_pieces(rendered.pieces), answer

        return encode

    def _admit(
        self,
        number: int,
        text: str | None,
        params: SamplingParams,
        encode: Callable[[], Encoded],
        label: str = "",
        fitted: Callable[[int, int], SamplingParams] | None = None,
        chat: bool = False,
    ) -> Request:
        """A request; `label` is what errors call it, `fitted` sees its length before its checks."""
        request = Request(f"{number}", text)
        try:
            ids, answer = encode()
            request.ids = tuple(ids)
            if fitted is not None:
                params = fitted(len(ids), self.limit)
            self._check_ids(label or number, request.ids)
            if self.truncate != "error":
                request.ids = self._cut(label or number, request.ids, params.max_tokens, chat)
                request.truncated = len(ids) - len(request.ids)
            self.check(label or number, request.ids, params)
            seed = draw_seed() if params.seq_seed is None else params.seq_seed
            for i in range(params.n):
                sample = Sample(
                    request=number,
                    index=i,
                    prompt=np.asarray(request.ids, np.int32),
                    params=params,
                    seed=sample_seed(seed, i),
                    text=answer(params),
                    leader=request.samples[0] if i else None,
                )
                request.samples.append(sample)
        except DeepInferError as error:
            request.error = error
        return request

    def _cut(
        self, number: int | str, ids: tuple[int, ...], max_tokens: int, chat: bool
    ) -> tuple[int, ...]:
        """A prompt without the tokens that are too many for it.

        A BOS at its start stays, since a prompt without it is another kind of text. Nothing is cut
        where nothing but the BOS would be left: that prompt is refused with its own length.
        """
        room = self.limit - max_tokens
        kept = int(ids[:1] == (self.config.bos_token_id,))
        if len(ids) <= room or room <= kept:
            return ids
        if self.truncate == "left":
            return ids[:kept] + ids[len(ids) - room + kept :]
        if chat:
            raise RequestError(
                f"Request {number}: a conversation of {len(ids)} tokens leaves no room for "
                f"max_tokens {max_tokens} in max_model_len {self.limit}.",
                "Its right end, which engine.truncate is to cut, is where the answer begins.",
                "Cut it on the left, shorten it, or lower max_tokens.",
            )
        return ids[:room]

    def _check_ids(self, number: int | str, ids: tuple[int, ...]) -> None:
        """What no cut makes good."""
        vocab = self.config.vocab_size
        if not ids:
            raise RequestError(
                f"Request {number} has an empty prompt.",
                "There is no token to continue from.",
                "Give at least one token; a text prompt brings its BOS by itself.",
            )
        wrong = next((i for i in ids if not 0 <= i < vocab), None)
        if wrong is not None:
            raise RequestError(
                f"Request {number} holds token id {wrong}; the vocabulary has {vocab} ids.",
                "An id outside the vocabulary has no embedding.",
                f"Use ids from 0 to {vocab - 1}, of this model's tokenizer.",
            )
        if self.config.image_token_id is not None and self.config.image_token_id in ids:
            raise _no_images(number)

    def check(self, number: int | str, ids: tuple[int, ...], params: SamplingParams) -> None:
        """Refuse, with a RequestError, what can never run; `number` is what the error calls it."""
        vocab, limit = self.config.vocab_size, self.limit
        if len(ids) + params.max_tokens > limit:
            room = limit - len(ids)
            do = f"Lower max_tokens to {room}" if room > 0 else f"Shorten it to {limit - 1}"
            raise RequestError(
                f"Request {number}: prompt {len(ids)} + max_tokens {params.max_tokens} exceeds "
                f"max_model_len {limit}.",
                "Nothing was truncated.",
                f"{do}, or have engine.truncate (--truncate) cut it on the left or right."
                if self.truncate == "error"
                else f"{do}.",
            )
        if params.so_args is not None:
            raise _later(number, "so_args", "structured output")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(params, name) or 0) > vocab:
                raise RequestError(
                    f"Request {number} asks for {name}={asked}; the vocabulary has {vocab} ids.",
                    "There are no more tokens to report.",
                    f"Set {name} to at most {vocab}.",
                )
        _check_known(number, "stops at", "stop_token_ids", params.stop_token_ids, vocab)
        _check_known(number, "forces", "golden_token_ids", params.golden_token_ids or (), vocab)


def as_ids(number: int | str, ids: Any) -> list[int]:
    """Token ids as a list. Raises RequestError for anything but one list of integers."""
    try:
        array = np.asarray(ids)
        kind = f"type {array.dtype} and shape {list(array.shape)}"
        whole = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
    except ValueError:
        array, kind, whole = np.zeros(0), "uneven nesting", False
    if not whole:
        raise RequestError(
            f"Request {number} has token ids of {kind}.",
            "A prompt is one list of integers.",
            "Pass a flat list of token ids.",
        )
    return [int(i) for i in array]


def _pairs(prompts: Any, token_ids: Any) -> list[tuple[str | None, Any]]:
    """(text, ids) of every prompt; ids is None for a text to encode."""

    def listed(name: str, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [value]
        # Bytes would pass for ids and a mapping's keys for texts.
        if isinstance(value, bytes | Mapping | set) or not isinstance(value, Iterable):
            raise RequestError(
                f"{name} is of type {type(value).__name__}.",
                "A prompt is a text or a list of token ids.",
                "Pass one of them, or a list of several.",
            )
        items = list(value)
        # A flat list of integers is one prompt.
        return [items] if items and isinstance(items[0], int | np.integer) else items

    if prompts is None and token_ids is None:
        raise RequestError(
            "generate got no prompts.",
            "It answers texts or token ids.",
            "Pass prompts or prompt_token_ids.",
        )
    texts = None if prompts is None else listed("prompts", prompts)
    ids = None if token_ids is None else listed("prompt_token_ids", token_ids)
    if texts is not None and ids is not None and len(texts) != len(ids):
        raise RequestError(
            f"generate got {len(texts)} prompts and {len(ids)} lists of token ids.",
            "Ids stand for the prompt at the same place.",
            "Give as many lists of ids as prompts, or one of the two only.",
        )
    if ids is not None:
        names = [t if isinstance(t, str) else None for t in texts or [None] * len(ids)]
        return list(zip(names, ids, strict=True))
    return [(t, None) if isinstance(t, str) else (None, t) for t in texts or []]


def _one_each(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    chosen = list(params) if isinstance(params, Iterable) else [params]
    wrong = next((p for p in chosen if not isinstance(p, SamplingParams)), None)
    if wrong is not None or isinstance(params, Mapping):
        raise RequestError(
            f"sampling_params is or holds a {type(params if wrong is None else wrong).__name__}.",
            "Values are checked when a SamplingParams is made.",
            "Pass one SamplingParams, or one per prompt.",
        )
    if len(chosen) != count:
        raise RequestError(
            f"There are {len(chosen)} sampling_params for {count} prompts.",
            "Each prompt is drawn with its own, or all with one.",
            f"Pass one SamplingParams, or {count} of them.",
        )
    return chosen


def _images(data: Any, count: int) -> list[Any]:
    if data is None:
        return [None] * count
    items = [data] if isinstance(data, Mapping) else list(data)
    if len(items) != count:
        raise RequestError(
            f"There are {len(items)} multi_modal_data for {count} prompts.",
            "Each stands for the prompt at the same place.",
            f"Pass {count} of them, None for a prompt without images.",
        )
    return [item if _holds_something(item) else None for item in items]


def _holds_something(item: Any) -> bool:
    values = list(item.values()) if isinstance(item, Mapping) else [item]
    return any(v is not None and not (isinstance(v, list | tuple) and not v) for v in values)


def _check_known(number: int | str, verb: str, name: str, ids: Sequence[int], vocab: int) -> None:
    wrong = next((i for i in ids if not 0 <= i < vocab), None)
    if wrong is not None:
        raise RequestError(
            f"Request {number} {verb} token id {wrong}; the vocabulary has {vocab} ids.",
            "A token outside the vocabulary is never drawn.",
            f"Use ids from 0 to {vocab - 1} in {name}.",
        )


def _no_images(number: int | str) -> RequestError:
    return RequestError(
        f"Request {number} holds an image.",
        "The vision tower is not part of this version, and an image is never skipped.",
        "Send text only.",
    )


def _later(number: int | str, name: str, what: str) -> RequestError:
    return RequestError(
        f"Request {number} sets {name}.",
        f"This version does not compute {what}, and an argument is never ignored.",
        f"Leave {name} out.",
    )
