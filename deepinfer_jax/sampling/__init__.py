"""From logits to tokens: the stable draw, the original engine's draw, and their random words."""

from deepinfer_jax.sampling.sampler import (
    Draw,
    Processed,
    Purpose,
    RowParams,
    draw_token,
    gumbel_noise,
    processed_logprobs,
    raw_logprobs,
    sample,
    top_logprobs,
)

__all__ = [
    "Draw",
    "Processed",
    "Purpose",
    "RowParams",
    "draw_token",
    "gumbel_noise",
    "processed_logprobs",
    "raw_logprobs",
    "sample",
    "top_logprobs",
]
