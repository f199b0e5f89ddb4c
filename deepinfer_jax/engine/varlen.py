"""How many drafts a step verifies in all, and whether it proposes new ones: the host's half.

What it reads of a step is two steps old when it plans, in overlapped mode because it cannot be
newer and in plain mode by choice: a budget must not depend on the drafts that it is for.

Drafts do not pay for every text nor for every number of sequences. Where the tokens a second that
the best budget promises stay below those of a step that neither verifies nor proposes, steps
propose nothing; now and then one does, so that it is noticed when drafts begin to pay. Nor do
they where prompts fill a step: a draft's row is then one that a prompt waits for, and it gives a
token at most, as the row of a token without drafts does.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from deepinfer_jax.engine.plan import DraftChoice, Plan
from deepinfer_jax.engine.step_times import StepTimes
from deepinfer_jax.runner.layout import Bucket
from deepinfer_jax.runner.step import StepOutput
from deepinfer_jax.sampling.lengths import best_total, budget, filled, survival

_LAG = 2  # steps
PROBE = 128  # steps after which drafts are proposed again
NEWS = 1 / 8  # what a new block counts for in the survivals of a sequence nothing is known of


def decode_sizes(buckets: Sequence[Bucket], sequences: int) -> list[Bucket]:
    """The programs in which so many sequences can decode, one of each number of rows, rising."""
    fitting: dict[int, Bucket] = {}
    for bucket in sorted(buckets):
        decodes = bucket.rows == bucket.decoder_rows and bucket.rows <= bucket.parts * bucket.width
        if decodes and bucket.parts >= sequences:
            fitting.setdefault(bucket.rows, bucket)
    return list(fitting.values())


class Lengths:
    """Confidences of the drafts of each slot, and what steps take."""

    def __init__(self, slots: int, drafts: int, times: Mapping[int, StepTimes]):
        """Nothing was drafted yet.

        Args:
            slots, drafts: sizes.
            times: sequences -> what steps take in which at most so many decode.
        """
        self._times, self._drafts = dict(sorted(times.items())), drafts
        self._proposed, self._decoded = 0, 1  # the last step that proposed; sequences of the last
        self._typical = np.ones(drafts, np.float32)
        self._kept = self._hoped = 1.0  # drafts of a step, and what was promised of them
        # (step, survivals of new drafts, old ones kept, what was promised of them), not yet counted
        self._news: deque[tuple[int, np.ndarray | None, float, float]] = deque()
        # Of each slot (step, sequence, survivals), the newest last.
        self._seen: list[deque[tuple[int, int, np.ndarray]]] = [deque() for _ in range(slots)]

    def restart(self) -> None:
        """Nobody runs any more, and steps are counted anew; what was learned stays."""
        self._proposed = 0
        self._news.clear()
        for seen in self._seen:
            seen.clear()

    def read(self, plan: Plan, part: int, sequence: int, out: StepOutput) -> None:
        """Take in what a step that was read says of a part that drew: drafts kept and drafted."""
        seen, offered = self._seen[int(plan.slot[part])], int(out.offered[part])
        hoped, sure = 0.0, None
        if offered and seen and seen[-1][:2] == (plan.step - 1, sequence):
            hoped = float(seen[-1][2][:offered].sum())
        if plan.proposes and not out.ended[part]:
            sure = survival(np.asarray(out.confidence[part]))
            seen.append((plan.step, sequence, sure))
            while len(seen) > _LAG + 1:
                seen.popleft()
        self._news.append((plan.step, sure, float(out.accepted[part]), hoped))

    def launched(self, plan: Plan) -> None:
        """Take in a step that was launched, and what the next may know of those before it."""
        while self._news and self._news[0][0] <= plan.step + 1 - _LAG:
            _, sure, kept, hoped = self._news.popleft()
            if hoped:
                self._kept += NEWS * (kept - self._kept)
                self._hoped += NEWS * (hoped - self._hoped)
            if sure is not None:
                self._typical += NEWS * (sure - self._typical)
        self._proposed = plan.step if plan.proposes else self._proposed
        self._decoded = int((~plan.prefill).sum()) or self._decoded

    def observe(self, plan: Plan, seconds: float) -> None:
        """Take in how long a step took; those without prompts tell, if they proposed."""
        bucket, sequences = plan.bucket, len(plan.slot)
        if bucket is None or plan.prefill.any() or not plan.proposes:
            return
        times = self._of(sequences)
        if bucket.rows in times.table.sizes:
            times.observe(sequences, bucket.rows, 1e3 * seconds, 0.0)

    def choice(
        self,
        step: int,
        slots: np.ndarray,
        sequences: np.ndarray,
        drafts: np.ndarray,
        *,
        crowded: bool = False,
    ) -> DraftChoice:
        """What step `step` does about drafts.

        Args:
            step: that is planned.
            slots: int32 [n], that decode. sequences: int32 [n], their numbers.
            drafts: int32 [n], how many of each can be verified.
            crowded: prompts fill what the sequences leave of the step.
        """
        if crowded:
            return DraftChoice(0, False)
        values, known = self._survivals(step, slots, sequences)
        n = len(slots) or self._decoded
        times = self._of(n)
        sizes, ms = times.table.sizes, times.milliseconds(n)
        plain = ms - times.drafting_ms
        # What is not known is like what was; of prompts alone, nothing is known. Drafts behind a
        # sequence's end are as sure as others, and nothing comes of them.
        likely = np.where(known[:, None], values, self._typical) if len(slots) else self._typical
        likely = np.broadcast_to(likely * min(1.0, self._kept / self._hoped), (n, self._drafts))
        _, rate = best_total(likely, np.full(n, self._drafts), sizes, ms)
        pays = rate >= float(n / plain[times.table.place(n)])
        proposes = pays or step - self._proposed >= PROBE
        if self._proposed != step - 1 or not len(slots):
            return DraftChoice(0, proposes)
        values = filled(values, known, drafts > 0)
        return DraftChoice(budget(values, drafts, sizes, ms if pays else plain) - n, proposes)

    def _survivals(
        self, step: int, slots: np.ndarray, sequences: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Float32 [n, g] as far as they are known, and bool [n] whether they are."""
        n = len(slots)
        values, known = np.zeros((n, self._drafts), np.float32), np.zeros(n, bool)
        for place, (slot, sequence) in enumerate(zip(slots, sequences, strict=True)):
            for made, owner, sure in reversed(self._seen[int(slot)]):
                if owner == sequence and made <= step - _LAG:
                    values[place], known[place] = sure, True
                    break
        return values, known

    def _of(self, sequences: int) -> StepTimes:
        return next(times for most, times in self._times.items() if most >= sequences)
