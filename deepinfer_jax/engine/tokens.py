"""What a step draws, or is told to write instead, brought to its sequences."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from deepinfer_jax.engine.plan import Plan
from deepinfer_jax.engine.sequence import Sequence, not_finite
from deepinfer_jax.runner.step import StepOptions
from deepinfer_jax.sampling.calibration import uncalibrated
from deepinfer_jax.sampling.verified import VerifiedBlock

DraftWatch = Callable[[int, int, VerifiedBlock], None]
"""Called with the place of the prompt, the index of its sample, and a block of it."""


def forced_tokens(
    plan: Plan, drawing: Iterable[tuple[int, int]], sequences: Mapping[int, Sequence]
) -> np.ndarray | None:
    """What is written in place of draws, int32 [slots], -1 for nothing; None for no slot at all.

    Args:
        plan: of the step.
        drawing: (part, number of its sequence) of those that draw.
        sequences: by number.
    """
    forced = None
    for part, number in drawing:
        sequence, slot = sequences[number], plan.slot[part]
        if sequence.params.golden_token_ids is not None:
            # What is in flight has drawn already: the count comes from the plan.
            index = int(plan.start[part] + plan.count[part]) - len(sequence.prompt)
            if forced is None:
                forced = np.full(len(plan.running.request), -1, np.int32)
            forced[slot] = sequence.forced(index)
    return forced


def take_tokens(sequence: Sequence, out: Any, part: int, *, raw: bool, eos: int, limit: int) -> int:
    """Give a sequence the tokens of its part of a collected `StepOutput`; returns how many.

    Args:
        sequence: it takes none after its end, of which the host knows more than the device.
        out: on the host.
        part: of the step.
        raw: its log-probs are those of temperature 1, unfiltered.
        eos: the end-of-sequence id.
        limit: longest sequence in tokens.
    """
    chosen = out.draw.raw_logprob if raw else out.draw.processed_logprob
    sequence.drafted += int(out.offered[part])
    sequence.accepted += int(out.accepted[part])
    count, taken = sequence.params.logprobs, 0
    for place in range(int(out.emitted[part])):
        if sequence.finished:
            break
        if out.draw.bad[part, place]:
            sequence.fail(not_finite(sequence.length))
            break
        if count is not None:
            ids, tops = out.top_ids[part, place], out.top_logprobs[part, place]
            sequence.record(float(chosen[part, place]), ids[:count], tops[:count])
        sequence.append(int(out.draw.token[part, place]), eos=eos, limit=limit)
        taken += 1
    return taken


def tell_drafts(
    sequence: Sequence, out: Any, part: int, options: StepOptions, watch: DraftWatch
) -> None:
    """Tell of the drafts that a collected step verified, after `take_tokens` took its tokens.

    The confidences that come with a step are of drafts that the sequence's next step verifies, so
    they wait in the sequence.
    """
    offered = int(out.offered[part])
    if offered and sequence.proposed is not None:
        temperature = np.asarray(options.confidence_temperature, np.float64)
        logits = uncalibrated(sequence.proposed.astype(np.float64), temperature)
        block = VerifiedBlock(
            offered, int(out.accepted[part]), tuple(logits.tolist()), sequence.finished
        )
        watch(sequence.request, sequence.index, block)
    sequence.proposed = out.confidence[part]
