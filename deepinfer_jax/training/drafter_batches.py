"""Batches of a target cache: samples packed into rows, epoch after epoch, from any step on."""

from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from deepinfer_jax.config import ModelConfig
from deepinfer_jax.errors import ConfigError
from deepinfer_jax.training.target_cache import CachedSample, TargetCache

TAP_CONVENTION = "mean of the streams that enter the layer"
"""Value of the manifest's free field `tap_convention` in a cache of this network."""

Plan = list[list[int]]
"""Sample numbers of each row of a batch."""


def check_cache(cache: TargetCache, config: ModelConfig, columns: int) -> None:
    """Raise ConfigError when the cache is of another target, or a sample exceeds a row."""
    manifest = cache.manifest
    expected = {
        "target_layer_ids": list(config.dspark_target_layer_ids),
        "hidden_size": config.hidden_size,
        "tap_convention": TAP_CONVENTION,
    }
    for key, value in expected.items():
        if manifest.get(key) != value:
            raise ConfigError(
                f"The target cache has {key} {manifest.get(key)!r}; the model needs {value!r}.",
                "The drafter would learn from hidden states that it never sees when it drafts.",
                "Write a cache of this model, or give the model that the cache was written with.",
            )
    longest = int(cache.lengths.max(initial=0))
    if not len(cache) or longest > columns:
        raise ConfigError(
            f"The target cache has {len(cache)} samples, the longest of {longest} tokens; rows "
            f"have {columns}.",
            "A sample is trained whole, in one row.",
            "Give longer rows with --columns, or another cache.",
        )


def plans(lengths: np.ndarray, rows: int, columns: int, seed: int) -> Iterator[Plan]:
    """Which samples stand in which row of each batch, without end.

    Epoch e takes the samples in the order of a permutation seeded with seed + e, each into the
    current row while it fits; the samples of an epoch's last, incomplete batch are left out. An
    epoch that does not fill one batch is one batch.

    Args:
        lengths: int [samples], each at most `columns`. rows, columns: of a batch. seed: of epoch 0.
    """
    for epoch in count():
        order = np.random.default_rng(seed + epoch).permutation(len(lengths))
        plan: Plan = [[]]
        used, batches = 0, 0
        for sample in order.tolist():
            if used + lengths[sample] > columns:
                if len(plan) == rows:
                    yield plan
                    plan, batches = [], batches + 1
                plan.append([])
                used = 0
            plan[-1].append(sample)
            used += int(lengths[sample])
        if not batches or len(plan) == rows:
            yield plan + [[] for _ in range(rows - len(plan))]


def cached_batches(
    cache: TargetCache, rows: int, columns: int, seed: int, start: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches from number `start` on, in the order of `plans`.

    Each has ids, segment int32 and mask bool [rows, columns], taps bfloat16 [rows, columns, m d],
    hidden bfloat16 [rows, columns, d].
    """
    for plan in islice(plans(cache.lengths, rows, columns, seed), start, None):
        yield _packed(cache, plan, columns)


def _packed(cache: TargetCache, plan: Plan, columns: int) -> dict[str, np.ndarray]:
    first = cache[0]
    shape = (len(plan), columns)
    batch = {
        "ids": np.zeros(shape, np.int32),
        "segment": np.zeros(shape, np.int32),
        "mask": np.zeros(shape, bool),
        "taps": np.zeros((*shape, first.hidden.shape[1]), first.hidden.dtype),
        "hidden": np.zeros((*shape, first.last_hidden.shape[1]), first.hidden.dtype),
    }
    for row, members in enumerate(plan):
        begin = 0
        for number, index in enumerate(members, start=1):
            sample = cache[index]
            here = np.s_[row, begin : begin + len(sample.ids)]
            batch["ids"][here] = sample.ids
            batch["segment"][here] = np.where(sample.attention_mask > 0, number, 0)
            batch["mask"][here] = sample.loss_mask > 0
            batch["taps"][here] = sample.hidden
            batch["hidden"][here] = sample.last_hidden
            begin += len(sample.ids)
    return batch


def samples_of(
    ids: np.ndarray,
    segment: np.ndarray,
    mask: np.ndarray,
    taps: np.ndarray,
    hidden: np.ndarray,
    least: int,
) -> Iterator[CachedSample]:
    """The segments of packed rows as samples; those with less than `least` trained tokens are left.

    ids, segment int32, mask bool, [b, t]; taps [b, t, m d] and hidden [b, t, d], bfloat16.
    """
    for row in range(len(ids)):
        for number in range(1, int(segment[row].max(initial=0)) + 1):
            here = segment[row] == number
            if mask[row][here].sum() >= least:
                yield CachedSample(
                    ids[row][here],
                    np.ones(int(here.sum()), np.uint8),
                    mask[row][here].astype(np.uint8),
                    taps[row][here],
                    hidden[row][here],
                )
