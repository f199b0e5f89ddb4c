"""Engram rows of a step's tokens, for an engine whose tables are in the host's memory."""

from collections.abc import Callable, Mapping

import numpy as np

from deepinfer_jax.engine.plan import Plan
from deepinfer_jax.engine.sequence import Sequence
from deepinfer_jax.errors import DeepInferError

Memory = Callable[[np.ndarray, int, int], tuple[np.ndarray, ...]]


def look_up(
    plan: Plan,
    sequences: Mapping[int, Sequence],
    memory: Memory,
    found: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """`found`, arrays [rows, width] per Engram layer, with the rows of a plan's tokens.

    A sequence whose rows cannot be read fails, and runs on without them to its next draw.
    """
    at = 0
    for slot, start, count in zip(plan.slot, plan.start, plan.count, strict=True):
        sequence = sequences[int(plan.running.request[slot])]
        if sequence.finished:
            at += int(count)
            continue  # its rows could not be read in an earlier chunk
        try:
            read = memory(sequence.tokens, int(start), int(start + count))
        except DeepInferError as error:
            sequence.fail(error)
        else:
            for layer, values in zip(found, read, strict=True):
                layer[at : at + count] = values
        at += int(count)
    return found
