"""What a request body asks of the engine, without the wire format."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer_jax.request import RequestOutput
from deepinfer_jax.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One prompt or conversation to answer.

    Attributes:
        params: how to draw and when to stop.
        prompt: a text or token ids; None of a conversation.
        messages: a conversation, else None.
        options: of a conversation, keyword arguments of `text.chat.render`.
        open_ended: max_tokens was left out, so that `params.max_tokens` gives way to the room
            that the prompt leaves. A limit that was asked for is never lowered.
        name: what errors call the request.
    """

    params: SamplingParams
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    open_ended: bool = False
    name: str = ""

    def fitted(self, prompt_tokens: int, limit: int) -> SamplingParams:
        """The parameters once the prompt's length is known.

        Args:
            prompt_tokens: length of the encoded prompt.
            limit: longest prompt and output together, in tokens.
        """
        if not self.open_ended:
            return self.params
        most = min(self.params.max_tokens, max(1, limit - prompt_tokens))
        return dataclasses.replace(self.params, max_tokens=most)


class Answering(Protocol):
    """An engine that answers asks as they finish."""

    def answer(self, asks: Iterable[Ask]) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (place among the asks, finished output), each place once, in any order.

        One that cannot run has `.error`; it never stops the others. Asks may be drawn from the
        iterable late, as slots become free.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked request body.

    Attributes:
        asks: a conversation is one; a completion one per prompt.
        model: the served name that the body gives.
        stream: chunks are asked for.
        include_usage: a stream is to end with the usage.
    """

    asks: tuple[Ask, ...]
    model: str
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class Stamp:
    """What a response body carries besides the answer.

    Attributes:
        id: the response's id.
        created: Unix time in seconds.
        fingerprint: names what the answer was computed with.
    """

    id: str
    created: int
    fingerprint: str | None = None
