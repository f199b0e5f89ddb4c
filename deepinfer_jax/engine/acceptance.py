"""How many drafts are kept, place by place, and whether a drafter has gone wrong."""

from dataclasses import dataclass

import numpy as np

_ENOUGH = 1000  # drafts at a place before its rate is judged
_COLLAPSED = 0.5  # of the first place's rate


@dataclass
class Acceptance:
    """Counts of drafts by their place in the block.

    Attributes:
        offered: int64 [g], drafts that were verified.
        reached: int64 [g], of them, those before which every draft was kept.
        kept: int64 [g], of them, those that were kept too.
        steps: how often a sequence had a draft verified.
    """

    offered: np.ndarray
    reached: np.ndarray
    kept: np.ndarray
    steps: int = 0

    @classmethod
    def empty(cls, drafts: int) -> "Acceptance":
        """Nothing was verified yet."""
        offered, reached, kept = np.zeros((3, drafts), np.int64)
        return cls(offered, reached, kept)

    def count(self, offered: int, accepted: int) -> None:
        """Add one sequence's step in which `accepted` of `offered` drafts were kept."""
        self.steps += offered > 0
        self.offered[:offered] += 1
        self.reached[: min(accepted + 1, offered)] += 1
        self.kept[:accepted] += 1

    @property
    def length(self) -> float:
        """Tokens that a step with drafts gives on average, NaN without one."""
        return 1 + int(self.kept.sum()) / self.steps if self.steps else float("nan")

    @property
    def conditional(self) -> np.ndarray:
        """Share of drafts that are kept once all before them are, [g]; NaN where none was."""
        with np.errstate(invalid="ignore"):
            return self.kept / self.reached

    def alarm(self) -> str | None:
        """What is wrong with the drafter, in a sentence, or None.

        A place after the first whose conditional acceptance is under half of the first one's means
        a block, a position or a Markov head that is computed wrongly, not a hard text.
        """
        rate = self.conditional
        judged = self.reached >= _ENOUGH
        low = np.flatnonzero(judged & (rate < _COLLAPSED * rate[:1]))
        if not len(low) or not judged[0]:
            return None
        place = int(low[0])
        return (
            f"Draft {place + 1} is kept in {100 * rate[place]:.1f} % of the cases in which all "
            f"before it are, and draft 1 in {100 * rate[0]:.1f} %: the drafter computes later "
            "places wrongly."
        )
