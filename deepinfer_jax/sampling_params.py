"""What users ask of one request: how its tokens are drawn, when it ends, what is reported.

A field that cannot be honoured is refused here, before anything runs.
"""

import copy
import difflib
import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from deepinfer_jax.errors import RequestError

MAX_SAMPLES = 4096
MAX_LOGPROBS = 1000
_MAX_INT32 = 2**31 - 1
_MASK64 = 2**64 - 1
_FLOAT32 = np.finfo(np.float32)

_ONLY_THESE = "The distribution is shaped by temperature, top_p and top_k alone, served as sent."
_NOT_OFFERED = {
    "presence_penalty": _ONLY_THESE,
    "frequency_penalty": _ONLY_THESE,
    "repetition_penalty": _ONLY_THESE,
    "no_repeat_ngram_size": _ONLY_THESE,
    "min_p": _ONLY_THESE,
    "typical_p": _ONLY_THESE,
    "logit_bias": _ONLY_THESE,
    "bad_words": _ONLY_THESE,
    "logits_processors": _ONLY_THESE,
    "min_tokens": "Ending early is never suppressed; ignore_eos=True runs to max_tokens.",
    "first_n_token_no_eos": "Ending early is never suppressed; ignore_eos=True runs to max_tokens.",
    "best_of": "Every sample that is drawn is returned; set n and choose by log-prob yourself.",
    "use_beam_search": "There is no beam search; set n for several samples.",
    "length_penalty": "There is no beam search; set n for several samples.",
    "early_stopping": "There is no beam search; set n for several samples.",
    "eos_id": "The end-of-sequence token is the tokenizer's; stop_token_ids adds others.",
}
# The original engine's keywords whose default says what happens here anyway.
_INERT = {"first_n_token_no_eos": 0, "eos_id": 0}
_RENAMED = {
    "seed": "seq_seed",
    "max_new_tokens": "max_tokens",
    "guided_decoding": "so_args",
    "structured_outputs": "so_args",
    "response_format": "so_args",
}


class ParameterError(RequestError, TypeError):
    """A parameter of a request with an unknown name or of the wrong type."""


def _explain_unknown_names[T](cls: type[T]) -> type[T]:
    """Make the class refuse a keyword it does not know with a reason or the nearest name."""
    generated = cls.__init__
    legal = [f.name for f in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(generated)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        if "top_logprobs" in kwargs:
            kwargs["logprobs"] = _top_logprobs(kwargs.pop("top_logprobs"), kwargs.get("logprobs"))
        for name in list(kwargs):
            if name in _INERT and type(kwargs[name]) is int and kwargs[name] == _INERT[name]:
                del kwargs[name]
            elif name in _NOT_OFFERED:
                raise ParameterError(
                    f"{cls.__name__} does not take {name}={kwargs[name]!r}.",
                    _NOT_OFFERED[name],
                    f"Leave {name} out.",
                )
            elif name in _RENAMED:
                raise ParameterError(
                    f"{cls.__name__} does not take {name}={kwargs[name]!r}.",
                    f"What it asks for is named {_RENAMED[name]} here.",
                    f"Use {_RENAMED[name]}.",
                )
            elif name not in legal:
                nearest = difflib.get_close_matches(name, legal, n=1, cutoff=0.0)[0]
                raise ParameterError(
                    f"{cls.__name__} got an unknown keyword {name!r}.",
                    f"Its keywords are {', '.join(legal)}.",
                    f"Did you mean {nearest!r}?",
                )
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _wrong_type(name: str, value: object, wanted: str) -> ParameterError:
    return ParameterError(
        f"{name} is {value!r}, of type {type(value).__name__}.",
        f"It must be {wanted}.",
        f"Pass {name} as {wanted}.",
    )


def _integer(name: str, value: object, low: int, high: int, why: str) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise _wrong_type(name, value, "an integer")
    if not low <= int(value) <= high:
        raise RequestError(
            f"{name}={value} is outside {low}..{high}.", why, f"Choose one of {low}..{high}."
        )
    return int(value)


def _real(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(
        value, int | float | np.integer | np.floating
    ):
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str | bytes | Mapping) or not isinstance(
        value, Sequence | set | frozenset
    ):
        raise _wrong_type(name, value, "a sequence of token ids")
    ids = sorted(value) if isinstance(value, set | frozenset) else value
    why = "A token id counts rows of the vocabulary."
    return tuple(_integer(f"{name}[{i}]", v, 0, _MAX_INT32, why) for i, v in enumerate(ids))


def _stop_strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise _wrong_type("stop", value, "a string or a sequence of strings")
    if "" in strings:
        raise RequestError(
            f"stop[{strings.index('')}] is an empty string.",
            "It would stop every sequence before its first token.",
            "Leave it out, or give the text to stop at.",
        )
    return tuple(strings)


def _logprob_count(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    why = f"{name} is how many of the likeliest tokens are reported beside the token itself."
    return _integer(name, value, 0, MAX_LOGPROBS, why)


def _top_logprobs(asked: object, logprobs: Any) -> int | bool | None:
    """What `logprobs` means beside the original engine's `top_logprobs`, of which 0 is off."""
    if asked is None:
        return logprobs
    why = "top_logprobs is how many of the likeliest tokens are reported."
    count = _integer("top_logprobs", asked, 0, MAX_LOGPROBS, why)
    if logprobs is None or isinstance(logprobs, bool):
        return count or logprobs
    if logprobs != count:
        raise RequestError(
            f"logprobs={logprobs} and top_logprobs={asked} ask for different numbers.",
            "Both say how many of the likeliest tokens are reported beside the token itself.",
            "Set one of them.",
        )
    return logprobs


def _grammar_arguments(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type("so_args", value, "a mapping with schema_type and schema")
    if set(value) != {"schema_type", "schema"}:
        raise RequestError(
            f"so_args has the keys {', '.join(sorted(map(str, value))) or '(none)'}.",
            "A grammar is described by exactly schema_type and schema.",
            "Give both, and nothing else.",
        )
    if not isinstance(value["schema_type"], str):
        raise _wrong_type("so_args['schema_type']", value["schema_type"], "a string")
    if not isinstance(value["schema"], str | Mapping | bool):
        raise _wrong_type("so_args['schema']", value["schema"], "a string or a mapping")
    return copy.deepcopy(dict(value))


@_explain_unknown_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are drawn and when it ends.

    Attributes:
        temperature: 0 is the true argmax; otherwise logits are divided by it.
        top_p: in (0, 1]; keep the shortest likeliest prefix of this probability.
        top_k: keep this many; -1 and 0 are off. Judged jointly with top_p: the shorter prefix.
        max_tokens: at least 1.
        n: how many samples of the prompt; sample i is drawn with `sample_seed(seq_seed, i)`.
        stop: strings that end the text; one string is taken as one.
        stop_token_ids: token ids that end the sequence, besides the tokenizer's.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: report this many likeliest tokens per position, and the token's own; 0 is the
            token's own only, True is 1, False and None are off.
        prompt_logprobs: the same for the prompt.
        seq_seed: integer taken modulo 2^64; None draws one from the operating system.
        so_args: {"schema_type": ..., "schema": ...}, the grammar to obey.
        golden_token_ids: forced output tokens by output index, for teacher forcing.

    Raises:
        RequestError: a value that can never be served. For an unknown keyword or a wrong type it
            is a `ParameterError`, which is a TypeError as well.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    seq_seed: int | None = None
    so_args: Mapping[str, Any] | None = field(default=None, hash=False)
    golden_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # The checked, canonical values replace what was passed; the caller's objects stay as are.
        put = functools.partial(object.__setattr__, self)
        temperature = _real("temperature", self.temperature)
        if temperature != 0 and not _FLOAT32.tiny <= temperature <= _FLOAT32.max:
            raise RequestError(
                f"temperature={temperature} cannot divide logits.",
                f"It must be 0, or from {_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g} (float32).",
                "Pass 0 for the likeliest token, or a positive number such as 1.0.",
            )
        put("temperature", abs(temperature))
        top_p = _real("top_p", self.top_p)
        if not 0 < top_p <= 1:
            raise RequestError(
                f"top_p={self.top_p} is outside (0, 1].",
                "It is the probability that the kept tokens must reach.",
                "Pass 1.0 to keep every token, or a probability above 0.",
            )
        put("top_p", top_p)
        why = "It is how many tokens may be drawn from; -1 and 0 are off."
        put("top_k", _integer("top_k", self.top_k, -1, _MAX_INT32, why))
        why = "A request produces at least one token."
        put("max_tokens", _integer("max_tokens", self.max_tokens, 1, _MAX_INT32, why))
        why = "It is how many samples of one prompt are drawn."
        put("n", _integer("n", self.n, 1, MAX_SAMPLES, why))
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise _wrong_type("ignore_eos", self.ignore_eos, "True or False")
        put("ignore_eos", bool(self.ignore_eos))
        put("logprobs", _logprob_count("logprobs", self.logprobs))
        put("prompt_logprobs", _logprob_count("prompt_logprobs", self.prompt_logprobs))
        if self.seq_seed is not None:
            seed = self.seq_seed
            if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
                raise _wrong_type("seq_seed", seed, "an integer or None")
            put("seq_seed", int(seed) & _MASK64)
        if self.so_args is not None:
            put("so_args", _grammar_arguments(self.so_args))
        if self.golden_token_ids is not None:
            golden = _token_ids("golden_token_ids", self.golden_token_ids)
            if len(golden) > self.max_tokens:
                raise RequestError(
                    f"golden_token_ids has {len(golden)} tokens, max_tokens is {self.max_tokens}.",
                    "The tokens past max_tokens would never be reached.",
                    f"Set max_tokens to at least {len(golden)}.",
                )
            put("golden_token_ids", golden)


def draw_seed() -> int:
    """A fresh 64-bit seed from the operating system."""
    return secrets.randbits(64)


def sample_seed(seq_seed: int, index: int) -> int:
    """The seed of sample `index` of a request, a 64-bit integer.

    Index 0 keeps seq_seed, so n=1 and the first of n samples agree. Index i > 0 has the i-th
    output of the SplitMix64 generator (Steele, Lea and Flood, 2014) started at seq_seed: add i
    times its gamma, then mix by two xor-shift multiplications. Distinct indices give distinct
    outputs, as the mixing is a bijection.
    """
    if index == 0:
        return seq_seed & _MASK64
    z = (seq_seed + index * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
