"""The members that chat completions and completions have in common, and what both refuse."""

from collections.abc import Collection, Mapping
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.protocol import fields
from deepinfer_jax.protocol.fields import Check

MAX_TOKENS = 393_216
MAX_STOPS = 16
MAX_TOP = 20
_SHAPED = "The distribution is shaped by temperature and top_p alone, served as sent."
_PENALTY = fields.only(0, _SHAPED, fields.number(-2, 2))


def _ignored(name: str, value: Any) -> None:
    """Bookkeeping of a hosted service, which no answer depends on."""


COMMON: Mapping[str, Check] = {
    "model": fields.text,
    "max_tokens": fields.integer(1, MAX_TOKENS),
    "temperature": fields.number(0, 2),
    "top_p": fields.number(0, 1, above=True),
    "stop": fields.strings(MAX_STOPS),
    "seed": fields.integer(0, 2**63 - 1),
    "stream": fields.boolean,
    "stream_options": fields.mapping,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": fields.only({}, _SHAPED, fields.mapping),
    "user": _ignored,
    "metadata": _ignored,
}


def sampling(found: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams` for the common members that were given."""
    names = {"temperature": "temperature", "top_p": "top_p", "stop": "stop", "seed": "seq_seed"}
    return {ours: found[theirs] for theirs, ours in names.items() if theirs in found}


def served_model(where: str, found: Mapping[str, Any], served: Collection[str]) -> str:
    """The model that the body names. Raises RequestError when it is not a served name."""
    model = fields.require(where, found, "model")
    if model not in served:
        raise RequestError(
            f"{where} names the model {model!r}.",
            f"The names served here are {', '.join(sorted(served))}.",
            "Use one of them.",
        )
    return model


def streaming(where: str, found: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether chunks are asked for, and whether they end with the usage."""
    stream = found.get("stream", False)
    options = found.get("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise RequestError(
            f"{where} has stream_options without stream.",
            "They say what a stream carries, and a whole response has no use for them.",
            "Set stream to true, or leave stream_options out.",
        )
    known = {"include_usage": fields.boolean}
    return stream, fields.read("stream_options", options, known).get("include_usage", False)
