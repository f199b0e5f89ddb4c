"""What a harness asks of a generation, as parameters of a request with a seed of its own."""

import hashlib
from collections.abc import Mapping
from typing import Any

from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling_params import SamplingParams

SEED_RULE = (
    "seq_seed = the first 8 bytes, little-endian, of "
    "SHA-256(f'{base seed}/{task}/{document}/{repeat}')"
)
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# Keywords of tasks whose usual value says what happens here anyway.
_INERT = {"num_beams": 1, "repetition_penalty": 1.0}


def seed_of(base: int, task: str | None, document: int | None, repeat: int) -> int:
    """The seed of one generation; it depends on no other, and not on their order.

    Args:
        base: of the run.
        task, document: the harness's names of what is asked.
        repeat: which generation of the same document, from 0.
    """
    text = f"{base}/{task}/{document}/{repeat}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def parameters(asked: Mapping[str, Any], *, most: int, seed: int) -> SamplingParams:
    """The parameters of one generation.

    `do_sample` false is greedy whatever the temperature; where it is left out, a temperature above
    0 draws, and none is greedy. `until` are stop strings, of which empty ones say nothing.

    Args:
        asked: the harness's keywords; those that are not its own are those of `SamplingParams`.
        most: tokens to generate where it does not say.
        seed: of the draws, unless a seq_seed is asked for.

    Raises:
        RequestError: a keyword that is unknown or cannot be honoured.
    """
    rest = dict(asked)
    for name, value in _INERT.items():
        if name in rest and rest[name] == value:
            del rest[name]
    until = rest.pop("until", None)
    stop = [until] if isinstance(until, str) else list(until or ())
    limits = {name: rest.pop(name) for name in _LIMITS if rest.get(name) is not None}
    if len(set(limits.values())) > 1:
        raise RequestError(
            f"A generation is limited by {', '.join(f'{k}={v}' for k, v in limits.items())}.",
            "All of them say how many tokens it may have.",
            "Set one of them.",
        )
    sampled, temperature = rest.pop("do_sample", None), rest.pop("temperature", None)
    if sampled is None:
        sampled = bool(temperature)
    if not sampled:
        temperature = 0.0
    return SamplingParams(
        **{
            "seq_seed": seed,
            **rest,
            "temperature": 1.0 if temperature is None else temperature,
            "max_tokens": next(iter(limits.values()), most),
            "stop": [text for text in stop if text],
        }
    )


def cut(text: str, until: tuple[str, ...]) -> str:
    """A text up to the first of the stop strings."""
    return min((text.split(stop)[0] for stop in until), key=len, default=text)
