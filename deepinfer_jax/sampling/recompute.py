"""Recompute recorded `original` draws from their seeds and settings."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.errors import RequestError
from deepinfer_jax.sampling.original import (
    OriginalDraw,
    original_logprobs,
    sample_original,
    verify_original,
)
from deepinfer_jax.sampling.philox import split64

_PER_ROW = (
    "task",
    "vocab",
    "kind",
    "logits_seed",
    "seq_seed",
    "position",
    "temperature",
    "top_p",
    "top_k",
    "draft_stream",
    "draft_mix",
    "draft_logits_seed",
    "draft_token",
)
_KINDS = ("bell", "flat", "ternary", "coarse", "sparse")


def mix64(values: np.ndarray) -> np.ndarray:
    """One SplitMix64 step of each uint64: add the golden gamma, then mix; modulo 2^64."""
    z = np.asarray(values, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def seeded_logits(kind: str, seed: int, vocab_size: int) -> np.ndarray:
    """Logits float32 [vocab_size] that are exact by construction, so that a seed describes them.

    With h = mix64(seed 2^32 + id): `bell` is the centred sum of the four 16-bit fields of h over
    2^13 (near normal, within 16); `flat` a 20-bit uniform in [-1, 1); `ternary` -1, 0 or 1;
    `coarse` bell rounded down to quarters; `sparse` bell for id 0 and where 61 divides h, and
    -inf elsewhere.

    Raises:
        RequestError: another kind.
    """
    start = np.uint64((seed << 32) & 0xFFFFFFFFFFFFFFFF)
    h = mix64(start + np.arange(vocab_size, dtype=np.uint64))
    if kind == "flat":
        return ((h & np.uint64(0xFFFFF)).astype(np.int64) / 2.0**19 - 1.0).astype(np.float32)
    if kind == "ternary":
        return (h % np.uint64(3)).astype(np.float32) - np.float32(1)
    if kind not in _KINDS:
        raise RequestError(
            f"Logits of kind {kind!r} are unknown.",
            f"A recording names one of {', '.join(_KINDS)}.",
            "Write the recording's kind column with those names.",
        )
    fields = h[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)
    bell = (fields.sum(axis=1).astype(np.float64) - 2.0**17) / 2.0**13
    if kind == "coarse":
        bell = np.floor(4 * bell) / 4
    if kind == "sparse":
        ruled_out = h % np.uint64(61) != 0
        ruled_out[0] = False
        bell = np.where(ruled_out, -np.inf, bell)
    return bell.astype(np.float32)


def _checked(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    missing = [name for name in _PER_ROW if name not in arrays]
    if missing:
        raise RequestError(
            f"The recording lacks {len(missing)} of its {len(_PER_ROW)} columns: "
            f"{', '.join(missing)}.",
            "A draw is recomputed from its seeds and settings alone, so each must be there.",
            "Add the columns, one value per row.",
        )
    columns = {name: np.asarray(arrays[name]) for name in _PER_ROW}
    count = columns["task"].shape
    uneven = [f"{name} {value.shape}" for name, value in columns.items() if value.shape != count]
    if uneven or len(count) != 1:
        raise RequestError(
            f"Columns of unequal length: task {count}, {', '.join(uneven) or 'not a vector'}.",
            "Every column holds one value per row.",
            "Write all columns as vectors of the same length.",
        )
    for name, legal in (
        ("task", ("fresh", "verify")),
        ("draft_mix", ("", "same", "near", "other")),
    ):
        strange = sorted(set(columns[name].tolist()) - set(legal))
        if strange:
            raise RequestError(
                f"Column {name} holds {', '.join(map(repr, strange))}.",
                f"It may hold {', '.join(map(repr, legal))}.",
                "Correct the column; nothing was recomputed.",
            )
    unmixed = np.flatnonzero((columns["task"] == "verify") & (columns["draft_mix"] == ""))
    if unmixed.size:
        raise RequestError(
            f"Verification row {unmixed[0]} has no draft_mix.",
            "Its draft distribution is built from that column.",
            "Set it to same, near or other.",
        )
    return columns


def _draft_logits(mix: str, logits: np.ndarray, seed: int) -> np.ndarray:
    if mix == "same":
        return logits
    if mix == "near":
        return logits + seeded_logits("flat", seed, logits.size)
    return seeded_logits("bell", seed, logits.size)


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _draw_group(
    columns: Mapping[str, np.ndarray], task: str, transform: Callable[[Callable[..., Any]], Any]
) -> OriginalDraw:
    vocab = int(columns["vocab"][0])
    pairs = zip(columns["kind"], columns["logits_seed"], strict=True)
    logits = np.stack([seeded_logits(str(kind), int(seed), vocab) for kind, seed in pairs])
    settings = (
        jnp.asarray(columns["temperature"].astype(np.float32)),
        jnp.asarray(columns["top_p"].astype(np.float32)),
        jnp.asarray(columns["top_k"].astype(np.int32)),
    )
    seed = jnp.asarray(np.stack([split64(int(value)) for value in columns["seq_seed"]]))
    position = jnp.asarray(columns["position"].astype(np.int32))
    if task == "fresh":
        draft = jnp.asarray(columns["draft_stream"].astype(np.bool_))
        return transform(sample_original)(jnp.asarray(logits), *settings, seed, position, draft)
    draft_logits = np.stack(
        [
            _draft_logits(str(mix), row, int(draft_seed))
            for mix, row, draft_seed in zip(
                columns["draft_mix"], logits, columns["draft_logits_seed"], strict=True
            )
        ]
    )
    law = transform(original_logprobs)(jnp.asarray(draft_logits), *settings)
    token = jnp.asarray(columns["draft_token"].astype(np.int32))
    return transform(verify_original)(
        jnp.asarray(logits), law.logprobs, token, *settings, seed, position
    )


def recompute(
    arrays: Mapping[str, np.ndarray],
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = _as_is,
) -> dict[str, np.ndarray]:
    """Run every recorded row again through the `original` draw.

    Args:
        arrays: columns of one value per row: task (`fresh` or `verify`), vocab, kind and
            logits_seed (see `seeded_logits`), seq_seed uint64, position (the position key),
            temperature, top_p, top_k, draft_stream, draft_mix, draft_logits_seed, draft_token.
            Draft logits are the row's own (`same`), those plus flat(draft_logits_seed) (`near`),
            or bell(draft_logits_seed) (`other`). Other arrays are results and are not read.
        transform: applied to each device function before it is called; pass a compiler here.

    Returns:
        token int32 [rows], accepted bool [rows], accept_prob float32 [rows], kept int32 [rows].

    Raises:
        RequestError: a column is missing, uneven or holds an unknown name, or a row's logits
            cannot be drawn from.
    """
    columns = _checked(arrays)
    count = columns["task"].size
    results = {
        "token": np.zeros(count, np.int32),
        "accepted": np.zeros(count, np.bool_),
        "accept_prob": np.zeros(count, np.float32),
        "kept": np.zeros(count, np.int32),
    }
    for task in ("fresh", "verify"):
        for vocab in np.unique(columns["vocab"][columns["task"] == task]):
            rows = np.flatnonzero((columns["task"] == task) & (columns["vocab"] == vocab))
            draws = jax.device_get(
                _draw_group({name: value[rows] for name, value in columns.items()}, task, transform)
            )
            if draws.bad.any():
                raise RequestError(
                    f"Row {rows[draws.bad][0]} has logits that cannot be drawn from.",
                    "NaN, +inf, or no finite logit at all.",
                    "Remove the row, or correct its kind and seed.",
                )
            for name, values in results.items():
                values[rows] = getattr(draws, name)
    return results
