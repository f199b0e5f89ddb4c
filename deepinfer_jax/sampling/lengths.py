"""How many drafts of each sequence are verified: calibrated confidence, total budget, split.

The host fixes how many rows a step has, from survivals that are two steps old; the split hands
them out by survivals of the drafts themselves. Both halves rank by the same rule: the likeliest
draft first, of equal ones the one of the earlier sequence, then of the earlier place. Functions
that take NumPy and JAX arrays compute the same from either.

A total that knew nothing of this step's drafts, and a split that keeps of a sequence a prefix
chosen by what stood before each draft, leave the law of the output as it is (draft model
specification, section 3.5). A total from the same step's confidences would not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax.errors import ConfigError

_LOGIT_LIMIT = 60.0


def _numpy_of(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def calibrated[A: (np.ndarray, jax.Array)](logit: A, temperature: A) -> A:
    """Confidences sigmoid(clamp(logit / temperature, -60, 60)) in (0, 1], in `logit`'s dtype.

    Args:
        logit: [..., g], of the confidence head, before any temperature.
        temperature: [g] or [], one per place of a draft, same dtype; 1 leaves it as it is.
    """
    xp = _numpy_of(logit)
    return 1 / (1 + xp.exp(-xp.clip(logit / temperature, -_LOGIT_LIMIT, _LOGIT_LIMIT)))


def survival[A: (np.ndarray, jax.Array)](confidence: A) -> A:
    """How likely each draft and all before it are accepted: running products along the last axis.

    A confidence that is not a number counts as 0, so that its draft is verified last. The products
    are taken from the left, one by one, so that every device and the host get the same bits.

    Args:
        confidence: float32 [..., g], of each draft given that those before it are accepted.
    """
    xp = _numpy_of(confidence)
    running = [xp.nan_to_num(confidence[..., 0], nan=0.0)]
    for place in range(1, confidence.shape[-1]):
        running.append(running[-1] * xp.nan_to_num(confidence[..., place], nan=0.0))
    return xp.stack(running, -1)


def carried[A: (np.ndarray, jax.Array)](previous: A, row: A) -> A:
    """Survivals [s, g] of s sequences, from those [p, g] of the step that drafted for them.

    Args:
        previous: float32 [p, g].
        row: int32 [s], where a sequence stood in that step; -1: it was not in it, and gets 0.
    """
    xp = _numpy_of(previous)
    found = previous[xp.maximum(row, 0)]
    return xp.where(row[:, None] >= 0, found, xp.zeros_like(found))


def filled(values: np.ndarray, known: np.ndarray, has_draft: np.ndarray) -> np.ndarray:
    """The host's survivals float32 [n, g]: where none are known, 1 with drafts and 0 without.

    Args:
        values: float32 [n, g]; rows that are not known are not read.
        known: bool [n].
        has_draft: bool [n], the sequence has drafts that can be verified.
    """
    absent = np.broadcast_to(has_draft[:, None], values.shape).astype(values.dtype)
    return np.where(known[:, None], values, absent)


def _candidates[A: (np.ndarray, jax.Array)](values: A, drafts: A) -> tuple[A, A]:
    """Ascending sort key of every draft, flat [s * g], and bool [s, g] whether it is one."""
    xp = _numpy_of(values)
    place = xp.arange(values.shape[1], dtype=xp.int32)
    real = place[None, :] < drafts[:, None]
    return xp.where(real, -values, xp.full_like(values, np.inf)).reshape(-1), real


def split[A: (np.ndarray, jax.Array)](values: A, drafts: A, rows: A | int) -> A:
    """Rows of each sequence, int32 [s]: 1 for its last token, and one for each draft verified.

    The `rows` are given out first one to every sequence, then to the drafts in the order of
    (-survival, sequence, place), until they or the drafts end. Survivals do not rise along a
    sequence, so what is chosen of it is always its first drafts.

    Args:
        values: float32 [s, g], survivals of the drafts that are to be verified.
        drafts: int32 [s], how many of its g places a sequence may verify; -1: there is no
            sequence, and it gets 0 rows.
        rows: int32 [], in total; may be traced.
    """
    xp = _numpy_of(values)
    key, real = _candidates(values, drafts)
    rank = xp.argsort(xp.argsort(key, stable=True), stable=True).reshape(values.shape)
    live = (drafts >= 0).astype(xp.int32)
    chosen = real & (rank < rows - live.sum(dtype=xp.int32))
    return live + chosen.sum(-1, dtype=xp.int32)


@dataclass(frozen=True, eq=False)
class CostTable:
    """What a step of each compiled size takes; another number of rows runs in the next size.

    Raises ConfigError when sizes do not rise from at least 1, or a time is not a positive number.

    Attributes:
        sizes: int64 [k], rows.
        ms: float64 [k], milliseconds of the target's forward pass.
    """

    sizes: np.ndarray
    ms: np.ndarray

    def __post_init__(self) -> None:
        sizes, ms = np.asarray(self.sizes, np.int64), np.asarray(self.ms, np.float64)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "ms", ms)
        rising = sizes.ndim == 1 and sizes.size > 0 and sizes[0] >= 1 and (np.diff(sizes) > 0).all()
        if not rising or ms.shape != sizes.shape or not ((ms > 0) & (ms < np.inf)).all():
            raise ConfigError(
                f"A cost table has sizes {sizes.tolist()} and milliseconds {ms.tolist()}.",
                "Every size from 1 up, in rising order, has one positive time.",
                "Measure the table again.",
            )

    @classmethod
    def of(cls, costs: Iterable[tuple[int, float]]) -> "CostTable":
        """From (rows, milliseconds) of every size."""
        sizes, ms = zip(*costs, strict=True)
        return cls(np.array(sizes), np.array(ms))

    def place(self, rows: int) -> int:
        """Index of the smallest size that holds `rows`; k when none does."""
        return int(np.searchsorted(self.sizes, rows))

    def milliseconds(self, slope_ms: float = 0.0, sampler_ms: float = 0.0) -> np.ndarray:
        """float64 [k]: the table, `slope_ms` more for every row, and sampling and drafting."""
        return self.ms + slope_ms * self.sizes + sampler_ms


def budget(values: np.ndarray, drafts: np.ndarray, sizes: np.ndarray, ms: np.ndarray) -> int:
    """Rows in total that give the most expected tokens a second; as `best_total`."""
    return best_total(values, drafts, sizes, ms)[0]


def best_total(
    values: np.ndarray, drafts: np.ndarray, sizes: np.ndarray, ms: np.ndarray
) -> tuple[int, float]:
    """Rows in total that give the most expected tokens a second, and tokens a millisecond of it.

    Over all totals, expected tokens are n plus the sum (float32, in order) of the largest
    survivals; the first total with the largest quotient of them and the step's time is taken, by
    a search of all, since a staircase of times has many local maxima. A total beyond the largest
    size never counts (original engine, section 7.4).

    Args:
        values: float32 [n, g], survivals that are at least two steps old (see `filled`).
        drafts: int32 [n], how many places a sequence may verify, at least 0.
        sizes: [k], rows of the compiled steps, rising.
        ms: float64 [k], what a step of each takes.

    Raises:
        ConfigError: a row for every sequence is more than the largest size.
    """
    n = values.shape[0]
    if n > sizes[-1]:
        raise ConfigError(
            f"{n} sequences need a step of {n} rows; the largest in the cost table has "
            f"{sizes[-1]}.",
            "Every sequence takes one row at least.",
            "Measure a cost table with the sizes of this engine, or lower max_num_seqs.",
        )
    key, real = _candidates(values, drafts)
    most = min(int(real.sum()), int(sizes[-1]) - n)
    best_first = -np.sort(key)[:most].astype(np.float32)
    expected = np.cumsum(np.concatenate([np.array([n], np.float32), best_first]), dtype=np.float32)
    time = ms[np.searchsorted(sizes, np.arange(n, n + most + 1))]
    rate = expected.astype(np.float64) / time
    best = int(np.argmax(rate))
    return n + best, float(rate[best])
