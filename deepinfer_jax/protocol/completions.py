"""`/v1/completions`: the request body as asks, and the response body of their answers."""

from collections.abc import Collection, Sequence
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.protocol import fields
from deepinfer_jax.protocol.ask import ApiRequest, Ask, Stamp
from deepinfer_jax.protocol.logprobs import completion_logprobs
from deepinfer_jax.protocol.response import finish_reason, text_ids, usage
from deepinfer_jax.protocol.shared_fields import (
    COMMON,
    MAX_TOP,
    sampling,
    served_model,
    streaming,
)
from deepinfer_jax.request import CompletionOutput, RequestOutput
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.tokenizer import Tokenizer

_WHERE = "The body"
_MAX_SAMPLES = 128


def _prompts(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either, as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(one, str) or _are_ids(one) for one in value):
            return tuple(one if isinstance(one, str) else tuple(one) for one in value)
    raise RequestError(
        f"{name} is {fields.shown(value)}.",
        "A prompt is a text or a list of token ids, and there is at least one.",
        "Send one of them, or a list of several.",
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, int) and not isinstance(one, bool) for one in value
    )


_FIELDS = {
    **COMMON,
    "prompt": _prompts,
    "n": fields.integer(1, _MAX_SAMPLES),
    "logprobs": fields.integer(0, MAX_TOP),
    "echo": fields.only(False, "The prompt is not part of the answer.", fields.boolean),
    "suffix": fields.only("", "Text is written after the prompt only.", fields.text),
    "best_of": fields.integer(1, _MAX_SAMPLES),
}


def parse(body: Any, served: Collection[str]) -> ApiRequest:
    """Check a request body.

    Args:
        body: the JSON value.
        served: names that `model` may have.

    Raises RequestError, naming the member, for everything that is not served as sent.
    """
    found = fields.read(_WHERE, body, _FIELDS)
    model = served_model(_WHERE, found, served)
    prompts = fields.require(_WHERE, found, "prompt")
    n = found.get("n", 1)
    if found.get("best_of", n) != n:
        raise RequestError(
            f"best_of is {found['best_of']} and n is {n}.",
            "Every sample that is drawn is returned.",
            "Set n, leave best_of out, and choose by log-prob.",
        )
    stream, include_usage = streaming(_WHERE, found)
    params = SamplingParams(
        **sampling(found),
        max_tokens=found.get("max_tokens", 16),
        n=n,
        logprobs=found.get("logprobs"),
    )
    asks = tuple(Ask(params=params, prompt=prompt) for prompt in prompts)
    return ApiRequest(asks=asks, model=model, stream=stream, include_usage=include_usage)


def respond(
    request: ApiRequest, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, stamp: Stamp
) -> dict[str, Any]:
    """The response body of finished answers without an error, as plain JSON values.

    Args:
        request: from `parse`.
        outputs: one per ask, in order. Choice k of prompt i has the index i n + k.
        tokenizer: that the answers were drawn with.
        stamp: id, time and fingerprint.
    """
    samples = [sample for output in outputs for sample in output.outputs]
    ids = [text_ids(sample, tokenizer) for sample in samples]
    return {
        "id": stamp.id,
        "object": "text_completion",
        "created": stamp.created,
        "model": request.model,
        "choices": [
            _choice(i, sample, own, tokenizer)
            for i, (sample, own) in enumerate(zip(samples, ids, strict=True))
        ],
        "usage": usage(outputs, sum(map(len, ids)), None),
        "system_fingerprint": stamp.fingerprint,
    }


def _choice(
    index: int, sample: CompletionOutput, ids: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    found = None
    if sample.logprobs is not None:
        found = completion_logprobs(ids, sample, tokenizer)
    return {
        "index": index,
        "text": sample.text,
        "logprobs": found,
        "finish_reason": finish_reason(sample),
    }
