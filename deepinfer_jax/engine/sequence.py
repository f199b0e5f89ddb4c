"""One sample of a request while it lives: its tokens, its text, and when it ends."""

from dataclasses import dataclass, field

import numpy as np

from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.request import CompletionOutput, FinishReason, TokenLogprobs
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.events import Answer
from deepinfer_jax.text.output import OutputText


@dataclass
class Sequence:
    """A running sample.

    Attributes:
        request: position of its request among the prompts.
        index: which of the request's samples.
        prompt: int32 [p].
        params: how to draw and when to stop.
        seed: the 64-bit seed of its draws.
        text: takes the generated tokens.
        output: generated tokens so far.
        leader: the first sample of the same prompt, whose caches it may take over; None for that.
        number: the engine's, once it has one.
        cached: prompt tokens that were not run, because an earlier sequence had.
    """

    request: int
    index: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    text: OutputText
    output: list[int] = field(default_factory=list)
    leader: "Sequence | None" = None
    number: int = 0
    cached: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: DeepInferError | None = None
    _logprobs: list[tuple[float, np.ndarray, np.ndarray]] = field(default_factory=list)
    _logprob_sum: float = 0.0
    _told: int = 0  # tokens that `news` has given away

    @property
    def length(self) -> int:
        """Prompt and output tokens together."""
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        """No token will follow."""
        return self.finish_reason is not None

    def forced(self, index: int) -> int:
        """The token that teacher forcing puts at an index of the output, or -1."""
        golden = self.params.golden_token_ids or ()
        return golden[index] if index < len(golden) else -1

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output, int32."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    def append(self, token: int, *, eos: int, limit: int) -> None:
        """Take the next token and decide whether it is the last.

        Args:
            token: what was drawn.
            eos: the end-of-sequence id.
            limit: longest sequence in tokens.
        """
        self.output.append(token)
        p = self.params
        if token == eos and not p.ignore_eos:
            self.finish("stop")
        elif token in p.stop_token_ids:
            self.finish("stop", token)
        else:
            self.text.push(token)
            if self.text.stopped is not None:
                self.finish("stop", self.text.stopped)
            elif len(self.output) >= p.max_tokens or self.length >= limit:
                self.finish("length")

    def record(self, token: float, top_ids: np.ndarray, top: np.ndarray) -> None:
        """Keep the log-probs of the token that `append` takes next."""
        self._logprobs.append((token, top_ids, top))
        self._logprob_sum += token

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> None:
        """End the sequence."""
        self.text.finish(reason)
        called = reason == "stop" and stop is None and self.text.whole().tool_calls
        self.finish_reason = "tool_calls" if called else reason
        self.stop_reason = stop

    def interrupt(self, reason: str) -> None:
        """End the sequence with what it has: its caller has gone, or its time is over."""
        if reason == "deadline":
            self.error = RequestError(
                f"The deadline passed after {len(self.output)} tokens.",
                "The request was to end by then, whatever had been produced.",
                "Give it more time, or lower max_tokens.",
            )
        self.finish("abort")

    def fail(self, error: DeepInferError) -> None:
        """End the sequence because of `error`."""
        self.error = error
        self.finish("error")

    def completion(self, mode: str) -> CompletionOutput:
        """All that it has produced; `mode` names the distribution of the log-probs."""
        return self._made(mode, self.text.whole(), 0)

    def news(self, mode: str) -> CompletionOutput:
        """What it has produced since the last call."""
        begin, self._told = self._told, len(self.output)
        return self._made(mode, self.text.new(), begin)

    def _made(self, mode: str, said: Answer, begin: int) -> CompletionOutput:
        """`said` with the tokens from number `begin` on."""
        kept, logprobs = self._logprobs[begin:], None
        if kept:
            values, ids, tops = zip(*kept, strict=True)
            logprobs = TokenLogprobs(
                token=np.asarray(values, np.float32),
                top_ids=np.stack(ids),
                top=np.stack(tops),
                mode="raw" if mode == "raw" else "processed",
            )
        return CompletionOutput(
            index=self.index,
            text=said.content,
            token_ids=tuple(self.output[begin:]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=self._logprob_sum if self._logprobs else None,
            seq_seed=self.seed,
            reasoning=said.reasoning if self.text.thinks else None,
            tool_calls=said.tool_calls,
        )
