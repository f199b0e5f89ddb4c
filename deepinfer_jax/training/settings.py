"""Every number of a training run, and the schedules that follow from them by step."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.skills.mixture import SHARES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class TrainingSettings:
    """One run; fractions are of `steps`, so that pieces of a run agree on the schedule.

    Attributes:
        steps: optimiser steps of the whole run.
        seed: of weights and batches.
        lr: peak rate. warmup: steps to reach it. decay_from: where the linear fall to
            `lr_final` * lr begins. rewarm: steps of a second warm-up after a resume.
        b1, b2, eps: Adam. weight_decay: on matrices other than tables and stream mixes.
        clip: largest global gradient norm. hc_rate: factor on the rate of stream mixes.
        guard_ratio: an update whose gradient norm exceeds this many running medians is skipped.
        logit_cap: attention logits above it shrink their head's query rows; 0 turns this off.
        bias_rate: step of the router biases.
        index_weight, z_weight: of the index loss and of the squared log-partition.
        sparse_from: from here on attention is restricted to the selection.
        qat_from: from here on weights and caches are rounded. long_from: first long step.
        long_every: every so many steps is a long one. ramp: where the difficulty reaches 1.
        embed_std: of the initial embedding.
        sum_direct: share of sums answered at once in short rows, relative to the other skills.
        chunk, long_chunk: query rows that share a causal bound, short and long steps.
        log_every, eval_every: steps. eval_batches: batches of each kind in the held-out set.
    """

    steps: int = 24_000
    seed: int = 0
    lr: float = 1.5e-3
    warmup: int = 400
    rewarm: int = 50
    decay_from: float = 0.5
    lr_final: float = 0.02
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.05
    clip: float = 1.0
    hc_rate: float = 0.3
    guard_ratio: float = 10.0
    logit_cap: float = 40.0
    bias_rate: float = 1e-3
    index_weight: float = 1.0
    z_weight: float = 3e-5
    sparse_from: float = 0.45
    qat_from: float = 0.85
    long_from: float = 0.1
    long_every: int = 3
    ramp: float = 0.3
    embed_std: float = 0.5
    sum_direct: float = SHARES["sum_direct"]
    chunk: int = 256
    long_chunk: int = 1024
    log_every: int = 50
    eval_every: int = 500
    eval_batches: int = 4

    def is_long(self, step: int) -> bool:
        """Whether this step takes long rows."""
        return step >= self.long_from * self.steps and step % self.long_every == 0

    def quantizes(self, step: int) -> bool:
        """Whether this step rounds weights and caches."""
        return step >= self.qat_from * self.steps

    def level(self, step: int) -> float:
        """Difficulty of the batch of this step, 0..1."""
        return min(1.0, step / max(self.ramp * self.steps, 1))


def override[S: DataclassInstance](settings: S, assignments: Iterable[str]) -> S:
    """`settings`, whose fields are numbers, with `name=value` texts applied.

    Raises ConfigError for an unknown name or a value of another type.
    """
    fields = {f.name: f.type for f in dataclasses.fields(settings)}
    changes: dict[str, int | float] = {}
    for text in assignments:
        name, _, value = text.partition("=")
        if name not in fields:
            raise ConfigError(
                f"There is no training setting named {name!r} (from {text!r}).",
                "A setting that is ignored would change the run without a trace.",
                f"Use one of: {', '.join(fields)}.",
            )
        kind = int if fields[name] is int else float
        try:
            changes[name] = kind(value)
        except ValueError:
            raise ConfigError(
                f"The training setting {name} was given {value!r}.",
                f"It is of type {kind.__name__}.",
                f"Write {name}=NUMBER.",
            ) from None
    return dataclasses.replace(settings, **changes)
