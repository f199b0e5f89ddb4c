"""What all response bodies share: usage, finish reasons, errors."""

from collections.abc import Sequence
from typing import Any

from deepinfer_jax.errors import DeepInferError, RequestError
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.text.tokenizer import Tokenizer

_REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "grammar": "stop"}


def text_ids(sample: CompletionOutput, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the text was read from: all but the one that ended the sequence."""
    ids = sample.token_ids
    if isinstance(sample.stop_reason, int):
        return ids[:-1]
    ended = sample.finish_reason != "length" and sample.stop_reason is None
    return ids[:-1] if ended and ids[-1:] == (tokenizer.eos_id,) else ids


def usage(
    outputs: Sequence[RequestOutput], completion: int, reasoning: int | None
) -> dict[str, Any]:
    """The `usage` member.

    Args:
        outputs: of all prompts; `metrics["cached_tokens"]` counts prompt tokens that were served
            from the prefix cache, none when it is missing.
        completion: generated tokens, without those that ended a sequence.
        reasoning: those inside the reasoning; None when the model did not think.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(int(output.metrics.get("cached_tokens", 0)) for output in outputs)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def finish_reason(sample: CompletionOutput) -> str:
    """The protocol's name of why a sample ended."""
    assert sample.finish_reason in _REASONS, f"{sample.finish_reason} has no response body"
    return _REASONS[sample.finish_reason]


def failure(outputs: Sequence[RequestOutput]) -> DeepInferError | None:
    """Why the outputs of one body have no response body, or None."""
    for output in outputs:
        if output.error is not None:
            return output.error
        for sample in output.outputs:
            if sample.finish_reason not in _REASONS:
                return DeepInferError(
                    f"Sample {sample.index} ended with {sample.finish_reason!r} after "
                    f"{len(sample.token_ids)} tokens.",
                    "A response holds whole answers only.",
                    "Send the request again.",
                )
    return None


def error_response(error: DeepInferError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body: 400 when the request is the reason, else 500."""
    status, kind = 500, "internal_error"
    if isinstance(error, RequestError):
        status, kind = 400, "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": None, "code": kind}
    return status, {"error": body}
