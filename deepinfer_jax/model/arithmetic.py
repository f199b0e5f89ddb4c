"""The three named arithmetics of a forward: what is rounded, and to which format."""

from dataclasses import dataclass

import jax.numpy as jnp

from deepinfer_jax.errors import ConfigError


@dataclass(frozen=True)
class Arithmetic:
    """What one arithmetic rounds.

    Attributes:
        name: `f32`, `f32qdq` or `release`.
        dtype: dtype of activations, residual streams and caches.
        quantize_caches: window KV, main KV, index keys and queries take their record's values.
        quantize_inputs: inputs of FP8 and FP4 linears are rounded to FP8 first.
        round_scores: index scores are rounded to bfloat16, as the published forward does.
    """

    name: str
    dtype: jnp.dtype
    quantize_caches: bool
    quantize_inputs: bool
    round_scores: bool


_F32, _BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
ARITHMETICS = {
    "f32": Arithmetic("f32", _F32, False, False, False),
    "f32qdq": Arithmetic("f32qdq", _F32, True, False, False),
    # Engines score in float32; only the traced comparison with the goldens rounds the scores.
    "release": Arithmetic("release", _BF16, True, True, False),
    "release_traced": Arithmetic("release_traced", _BF16, True, True, True),
}


def arithmetic(name: str) -> Arithmetic:
    """The arithmetic called `name`; ConfigError names the legal ones."""
    if name not in ARITHMETICS:
        raise ConfigError(
            f"There is no arithmetic named {name!r}.",
            f"The arithmetics are {', '.join(ARITHMETICS)}.",
            "Choose one of them.",
        )
    return ARITHMETICS[name]
