"""The three named arithmetics of a forward: what is rounded, and how the caches hold it."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.model.records import ROUNDED, UNROUNDED, CacheFormat


@dataclass(frozen=True)
class Arithmetic:
    """What one arithmetic rounds.

    Attributes:
        name: `f32`, `f32qdq` or `release`.
        dtype: dtype of activations and residual streams.
        quantize_caches: window KV, main KV, index keys and queries take their record's values.
        quantize_inputs: inputs of FP8 and FP4 linears are rounded to FP8 first.
        round_scores: index scores are rounded to bfloat16, as the published forward does.
        caches: how keys are kept; `encode` rounds them where `quantize_caches` says so.
    """

    name: str
    dtype: jnp.dtype
    quantize_caches: bool
    quantize_inputs: bool
    round_scores: bool
    caches: CacheFormat


_F32, _BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ARITHMETICS = {
    "f32": Arithmetic("f32", _F32, False, False, False, UNROUNDED["f32"]),
    "f32qdq": Arithmetic("f32qdq", _F32, True, False, False, ROUNDED["f32"]),
    # Engines score in float32; only the traced comparison with the goldens rounds the scores.
    "release": Arithmetic("release", _BF16, True, True, False, ROUNDED["release"]),
    "release_traced": Arithmetic("release_traced", _BF16, True, True, True, ROUNDED["release"]),
}


def arithmetic(name: str, cache_format: str | None = None) -> Arithmetic:
    """The arithmetic called `name`, with its caches in a format that holds what it defines.

    Without `cache_format` they are kept as the release keeps them under `release`, and in float32
    otherwise. ConfigError names the legal arithmetics, or the formats legal with this one.
    """
    if name not in ARITHMETICS:
        raise ConfigError(
            f"There is no arithmetic named {name!r}.",
            f"The arithmetics are {', '.join(ARITHMETICS)}.",
            "Choose one of them.",
        )
    found = ARITHMETICS[name]
    if cache_format is None:
        return found
    legal = ROUNDED if found.quantize_caches else UNROUNDED
    if cache_format not in legal:
        raise ConfigError(
            f"engine.cache_format is {cache_format!r} with the arithmetic {name}.",
            f"A cache holds what the arithmetic defines to the last bit; with {name} the formats "
            f"that do are: {', '.join(legal)}.",
            "Set engine.cache_format to one of them or leave it out, or choose an arithmetic that "
            "rounds its keys (f32qdq, release).",
        )
    return replace(found, caches=legal[cache_format])
