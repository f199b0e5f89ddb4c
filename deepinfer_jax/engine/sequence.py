"""One sample of a request while it lives: its tokens, its text, and when it ends."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.request import CompletionOutput, FinishReason, TokenLogprobs
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.events import Answer
from deepinfer_jax.text.output import OutputText


@dataclass
class PromptLogprobs:
    """Log-probs of s prompt tokens that follow each other, as they come in.

    Attributes:
        token: float32 [s]. greedy: bool [s], the token is its distribution's likeliest.
        top_ids, top: [s, k].
        count: tokens whose values are there, from the first on.
    """

    token: np.ndarray
    greedy: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    count: int = 0

    @classmethod
    def empty(cls, tokens: int, top: int) -> "PromptLogprobs":
        """Nothing is there yet."""
        return cls(
            token=np.full(tokens, np.nan, np.float32),
            greedy=np.zeros(tokens, bool),
            top_ids=np.full((tokens, top), -1, np.int32),
            top=np.full((tokens, top), np.nan, np.float32),
        )

    @property
    def complete(self) -> bool:
        """No value is missing."""
        return self.count == len(self.token)

    def put(self, first: int, made: Any, rows: slice) -> None:
        """Take rows of a step's `PromptScores` in as tokens `first` and after; others fall away.

        Values that are there already stay: a prompt that is run again has been told before.
        """
        old, new = self.count, min(first + rows.stop - rows.start, len(self.token))
        if new <= old:
            return
        assert first <= old, "a prompt's rows are collected in order"
        at, top = slice(rows.start + old - first, rows.start + new - first), self.top.shape[1]
        here = slice(old, new)
        self.token[here], self.greedy[here] = made.logprob[at], made.greedy[at]
        self.top_ids[here] = made.top_ids[at, :top]
        self.top[here] = made.top_logprobs[at, :top]
        self.count = new


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
        leader: the first sample of the same prompt, whose caches it may take over, or None.
        number: the engine's, once it has one.
        cached: prompt tokens that were not run, because an earlier sequence had.
        score_from: first position whose row is scored against the token after it, when
            `params.prompt_logprobs` is set; rows before it may come from a cache.
        drafted, accepted: drafts of its tokens that were verified, and that were kept.
        proposed: float32 [g], confidence of the drafts that its next step verifies; None unless
            somebody watches drafts.
        scores: of the prompt's tokens after `score_from`; of several samples, only the first's.
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
    drafted: int = 0
    accepted: int = 0
    proposed: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: DeepInferError | None = None
    score_from: int = 0
    scores: "PromptLogprobs | None" = None
    _logprobs: list[tuple[float, np.ndarray, np.ndarray]] = field(default_factory=list)
    _logprob_sum: float = 0.0
    _told: int = 0  # tokens that `news` has given away

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None and self.index == 0:
            tokens = len(self.prompt) - 1
            self.scores = PromptLogprobs.empty(tokens, self.params.prompt_logprobs)

    def score_after(self, position: int) -> None:
        """Score the tokens after a position and the first forced one, and none before."""
        self.score_from = position
        self.scores = PromptLogprobs.empty(len(self.prompt) - position, 0)

    @property
    def reusable(self) -> int:
        """Positions whose rows need not be run if a cache has them: those before the next score."""
        if self.scores is None or self.scores.complete:
            return self.length
        return self.score_from + self.scores.count

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

    def prompt_logprobs(self, mode: str) -> TokenLogprobs | None:
        """Of all tokens after `score_from`, once they are there."""
        found = self.scores
        if found is None or not found.complete:
            return None
        named = "raw" if mode == "raw" else "processed"
        return TokenLogprobs(token=found.token, top_ids=found.top_ids, top=found.top, mode=named)

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
            drafted=self.drafted,
            accepted=self.accepted,
            reasoning=said.reasoning if self.text.thinks else None,
            tool_calls=said.tool_calls,
        )


def not_finite(length: int) -> RequestError:
    """The error of logits after `length` tokens that are no numbers."""
    return RequestError(
        f"The logits after token {length} hold NaN or infinity.",
        "No token can be drawn from such a distribution.",
        "Check the checkpoint's digest; if it is right, report the prompt.",
    )
