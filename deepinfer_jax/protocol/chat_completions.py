"""`/v1/chat/completions`: the request body as an ask, and the response body of its answer."""

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.protocol import fields
from deepinfer_jax.protocol.ask import ApiRequest, Ask, Stamp
from deepinfer_jax.protocol.logprobs import chat_logprobs
from deepinfer_jax.protocol.response import finish_reason, text_ids, usage
from deepinfer_jax.protocol.shared_fields import (
    COMMON,
    MAX_TOKENS,
    MAX_TOP,
    sampling,
    served_model,
    streaming,
)
from deepinfer_jax.request import CompletionOutput, RequestOutput, ToolCall
from deepinfer_jax.sampling_params import SamplingParams
from deepinfer_jax.text.chat import render
from deepinfer_jax.text.options import resolve_thinking
from deepinfer_jax.text.parse import OutputParser
from deepinfer_jax.text.tokenizer import Tokenizer

_WHERE = "The body"
_MAX_EFFORT = 100
_UNLIMITED = {"off": 8_192, "on": 65_536, "max": 131_072}
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def _any(name: str, value: Any) -> Any:
    """Checked by the renderer, which knows the forms."""
    return value


_FIELDS = {
    **COMMON,
    "messages": fields.array,
    "max_completion_tokens": fields.integer(1, MAX_TOKENS),
    "thinking": fields.mapping,
    "reasoning_effort": _any,
    "tools": fields.array,
    "tool_choice": _any,
    "response_format": fields.mapping,
    "logprobs": fields.boolean,
    "top_logprobs": fields.integer(0, MAX_TOP),
    "continue_final_message": fields.boolean,
    "n": fields.only(1, "A chat completion has one choice.", fields.integer(1, 128)),
    "parallel_tool_calls": fields.only(
        True, "How many calls an answer makes is the model's choice.", fields.boolean
    ),
    "service_tier": fields.one_of("auto", "default"),
    "store": fields.only(False, "Nothing is stored here.", fields.boolean),
}
_REFUSED = {
    "functions": ("It is an older form of tools.", "Declare the functions as tools."),
    "function_call": ("It is an older form of tool_choice.", "Use tool_choice."),
    "chat_template_kwargs": (
        "Prompts are rendered in one fixed format.",
        "Use thinking and reasoning_effort.",
    ),
    "modalities": ("Answers are text.", "Leave it out."),
    "audio": ("Answers are text.", "Leave it out."),
}
_MESSAGE = (
    *("role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"),
    *("prefix", "task", "tools"),
)


def parse(body: Any, served: Collection[str]) -> ApiRequest:
    """Check a request body.

    Args:
        body: the JSON value.
        served: names that `model` may have.

    Raises RequestError, naming the member, for everything that is not served as sent. What only
    the whole conversation shows, such as an unanswered tool call, is refused by `render`.
    """
    found = fields.read(_WHERE, body, _FIELDS, _REFUSED)
    model = served_model(_WHERE, found, served)
    messages = fields.require(_WHERE, found, "messages")
    for i, message in enumerate(messages):
        _check_message(i, message)
    _check_format(found.get("response_format"))
    stream, include_usage = streaming(_WHERE, found)
    thinking, effort = _thinking(found), found.get("reasoning_effort")
    on, level = resolve_thinking(thinking, effort)
    asked = _max_tokens(found)
    mode = "off" if not on else "max" if level == _MAX_EFFORT else "on"
    params = SamplingParams(
        **sampling(found),
        max_tokens=_UNLIMITED[mode] if asked is None else asked,
        logprobs=_logprobs(found),
    )
    options = {
        "thinking": thinking,
        "effort": effort,
        "tools": tuple(found.get("tools", ())),
        "tool_choice": found.get("tool_choice"),
        "response_format": found.get("response_format"),
        "continue_final_message": found.get("continue_final_message", False),
    }
    ask = Ask(params=params, messages=tuple(messages), options=options, open_ended=asked is None)
    return ApiRequest(asks=(ask,), model=model, stream=stream, include_usage=include_usage)


def respond(
    request: ApiRequest, outputs: Sequence[RequestOutput], tokenizer: Tokenizer, stamp: Stamp
) -> dict[str, Any]:
    """The response body of a finished answer without an error, as plain JSON values.

    Args:
        request: from `parse`.
        outputs: of its one ask.
        tokenizer: that the answer was drawn with.
        stamp: id, time and fingerprint.
    """
    (ask,), (output,) = request.asks, outputs
    (sample,) = output.outputs
    ids = text_ids(sample, tokenizer)
    parser = _parser(ask, tokenizer)
    found = None
    if ask.params.logprobs is not None:
        found = chat_logprobs(ids, sample, parser, tokenizer)
    elif sample.reasoning is not None:
        parser.push_ids(ids)
    thought = None if sample.reasoning is None else parser.reasoning_tokens
    return {
        "id": stamp.id,
        "object": "chat.completion",
        "created": stamp.created,
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": _message(sample, stamp.id),
                "logprobs": found,
                "finish_reason": finish_reason(sample),
            }
        ],
        "usage": usage(outputs, len(ids), thought),
        "system_fingerprint": stamp.fingerprint,
    }


def call_id(response_id: str, index: int) -> str:
    """The id of a response's tool call: the same whenever it is asked for."""
    value = int.from_bytes(hashlib.sha256(f"{response_id} {index}".encode()).digest())
    digits = ""
    for _ in range(24):
        value, digit = divmod(value, len(_ALPHABET))
        digits += _ALPHABET[digit]
    return f"call_{index:02}_{digits}"


def _message(sample: CompletionOutput, response_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": sample.text}
    if sample.reasoning is not None:
        message["reasoning_content"] = sample.reasoning
    if sample.tool_calls:
        message["tool_calls"] = [
            _call(i, call, response_id) for i, call in enumerate(sample.tool_calls)
        ]
    return message


def _call(index: int, call: ToolCall, response_id: str) -> dict[str, Any]:
    return {
        "index": index,
        "id": call_id(response_id, index),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _parser(ask: Ask, tokenizer: Tokenizer) -> OutputParser:
    """A parser that reads the answer as the engine did."""
    assert ask.messages is not None, "a chat completion is a conversation"
    parsing = render(ask.messages, **ask.options).parsing
    return OutputParser(dataclasses.replace(parsing, stop=tuple(ask.params.stop)), tokenizer)


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        return  # the renderer says what a message is
    # Clients send an answer back with members that are empty there.
    known = {name: _any for name in _MESSAGE}
    kept = {name: value for name, value in message.items() if name in known or value}
    fields.read(f"messages[{index}]", kept, known)


def _check_format(given: Mapping[str, Any] | None) -> None:
    kind = None if given is None else given.get("type")
    inner = None if given is None else given.get("json_schema")
    strict = kind == "json_schema" and isinstance(inner, Mapping) and inner.get("strict")
    if strict or kind == "regex":
        raise RequestError(
            f"response_format is {fields.shown(given)}.",
            "This version writes the format into the prompt and cannot enforce it.",
            "Leave it out, or send a json_schema without strict.",
        )


def _thinking(found: Mapping[str, Any]) -> bool | None:
    if "thinking" not in found:
        return None
    known = {"type": fields.one_of("enabled", "adaptive", "disabled")}
    switch = fields.read("thinking", found["thinking"], known)
    return fields.require("thinking", switch, "type") != "disabled"


def _max_tokens(found: Mapping[str, Any]) -> int | None:
    given = [found[name] for name in ("max_tokens", "max_completion_tokens") if name in found]
    if len(set(given)) > 1:
        raise RequestError(
            f"max_tokens is {given[0]} and max_completion_tokens is {given[1]}.",
            "Both limit the tokens of the answer, its reasoning included.",
            "Send one of them.",
        )
    return given[0] if given else None


def _logprobs(found: Mapping[str, Any]) -> int | None:
    asked = found.get("logprobs", False)
    if "top_logprobs" in found and not asked:
        raise RequestError(
            f"top_logprobs is {found['top_logprobs']}, but logprobs is not true.",
            "The likeliest tokens are reported beside the log-probs of the drawn ones.",
            "Set logprobs to true, or leave top_logprobs out.",
        )
    return found.get("top_logprobs", 0) if asked else None
