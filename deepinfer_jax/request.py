"""What users get: the plain results of a request, whole or as the parts of a stream."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from deepinfer_jax.errors import DeepInferError

FinishReason = Literal["stop", "length", "tool_calls", "grammar", "abort", "error"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLogprobs:
    """Log-probs of t tokens, as arrays.

    Attributes:
        token: float32 [t], natural log of each token's probability.
        top_ids: int32 [t, k], the likeliest tokens at each position, likeliest first.
        top: float32 [t, k], their log-probs.
        mode: `raw` (temperature 1, before masks and filter) or `processed` (as drawn from).
    """

    token: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray
    mode: Literal["raw", "processed"] = "raw"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, or in a stream a part of one.

    Attributes:
        name: the function's; of a part after the first it is empty.
        arguments: JSON text as generated, maybe cut off.
        index: which call of the answer, from 0.
    """

    name: str
    arguments: str
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt; in a stream, what is new of it.

    In a stream the text, reasoning, tool calls, tokens and log-probs are those since the sample's
    previous output, and every other field is as it stands then.

    Attributes:
        index: which of the n samples.
        text: the decoded text, cut at a stop string; of a chat the answer alone.
        reasoning: of a chat, what the model thought before its answer; else None.
        tool_calls: of a chat, the calls that the model wrote.
        token_ids: the emitted tokens, an end-of-sequence token included.
        finish_reason: None while the sequence runs, so in a stream set in the sample's last
            output only.
        stop_reason: the stop string or stop token id that ended it, else None.
        logprobs: per-token log-probs if they were asked for.
        cumulative_logprob: sum of all its tokens' log-probs, if they were asked for.
        seq_seed: the seed this sample was drawn with; passing it again repeats it.
        drafted: how many draft tokens were verified; in a stream, so far.
        accepted: how many of them were kept.
        grammar_complete: whether the text is a complete word of the grammar; None without one.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None
    cumulative_logprob: float | None = None
    seq_seed: int | None = None
    drafted: int = 0
    accepted: int = 0
    grammar_complete: bool | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """How likely a continuation is after a context; there is one for every pair, whatever fails.

    Attributes:
        logprob_sum: the sum of `logprobs`, taken in float64; 0 for an empty continuation, NaN
            after an error.
        logprobs: float32 [c], natural log of each token's probability at temperature 1, given all
            tokens before it.
        is_greedy: every token is the likeliest at its place (lowest id on ties), so that greedy
            decoding would write exactly this.
        context_token_ids, token_ids: the tokens of the context and the continuation, as scored.
        error: why the pair could not be scored, or None.
    """

    logprob_sum: float
    logprobs: np.ndarray
    is_greedy: bool
    context_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    error: DeepInferError | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What became of one prompt; there is one for every prompt, whatever fails.

    In a stream it is what one step added: `outputs` has the samples with something new, and
    `join` makes one result of a request's outputs.

    Attributes:
        request_id: the engine's name of the request.
        prompt: the prompt's text, None if it was given as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: one per sample, in order; empty if the request failed before its first token.
        finished: no more will come.
        error: why the request failed, or None. It is reported, not raised, so that the other
            requests of the call are not lost.
        prompt_logprobs: of the prompt's tokens after the first, if they were asked for: of p tokens
            arrays of p - 1. In a stream they come once, with the first token.
        metrics: measured numbers by name; durations in seconds (names end in `_s`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False
    error: DeepInferError | None = None
    prompt_logprobs: TokenLogprobs | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Iterable["RequestOutput"]) -> "RequestOutput":
        """The result whose streamed outputs are `parts`: at least one, all of them, in order.

        It equals what `generate` or `chat` return for the same tokens.
        """
        given = list(parts)
        samples: dict[int, list[CompletionOutput]] = {}
        for part in given:
            for sample in part.outputs:
                samples.setdefault(sample.index, []).append(sample)
        outputs = tuple(_joined(samples[index]) for index in sorted(samples))
        scored = next((p.prompt_logprobs for p in given if p.prompt_logprobs is not None), None)
        return replace(given[-1], outputs=outputs, prompt_logprobs=scored)


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    """One sample from its streamed outputs."""
    reasoning = [p.reasoning for p in parts if p.reasoning is not None]
    logprobs = [p.logprobs for p in parts if p.logprobs is not None]
    calls: dict[int, list[ToolCall]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        calls.setdefault(call.index, []).append(call)
    return replace(
        parts[-1],
        text="".join(p.text for p in parts),
        reasoning="".join(reasoning) if reasoning else None,
        tool_calls=tuple(
            ToolCall(several[0].name, "".join(c.arguments for c in several), index)
            for index, several in calls.items()
        ),
        token_ids=tuple(token for p in parts for token in p.token_ids),
        logprobs=None
        if not logprobs
        else TokenLogprobs(
            token=np.concatenate([found.token for found in logprobs]),
            top_ids=np.concatenate([found.top_ids for found in logprobs]),
            top=np.concatenate([found.top for found in logprobs]),
            mode=logprobs[0].mode,
        ),
    )
