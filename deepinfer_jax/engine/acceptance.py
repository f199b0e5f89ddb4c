"""How many drafts are kept, place by place, and whether a drafter has gone wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_ENOUGH = 1000  # drafts at a place before its rate is judged
_COLLAPSED = 0.5  # of the first place's rate
_EVERY = 100  # steps between two judgements


@dataclass(eq=False)
class Acceptance:
    """Counts of drafts by their place in the block.

    Attributes:
        offered: int64 [g], drafts that were verified.
        reached: int64 [g], of them, those before which every draft was kept.
        kept: int64 [g], of them, those that were kept too.
        steps: how often a sequence had a draft verified.
        on_alarm: told once what is wrong with the drafter, when `alarm` first has something to say.
    """

    offered: np.ndarray
    reached: np.ndarray
    kept: np.ndarray
    steps: int = 0
    on_alarm: Callable[[str], None] | None = None

    @classmethod
    def empty(cls, drafts: int) -> "Acceptance":
        """Nothing was verified yet."""
        offered, reached, kept = np.zeros((3, drafts), np.int64)
        return cls(offered, reached, kept)

    def count(self, offered: int, accepted: int) -> None:
        """Add one sequence's step in which `accepted` of `offered` drafts were kept."""
        if not offered:
            return
        self.steps += 1
        self.offered[:offered] += 1
        self.reached[: min(accepted + 1, offered)] += 1
        self.kept[:accepted] += 1
        if self.on_alarm is not None and self.steps % _EVERY == 0:
            found = self.alarm()
            if found is not None:
                tell, self.on_alarm = self.on_alarm, None
                tell(found)

    def copy(self) -> "Acceptance":
        """The counts as they stand, which later steps do not change."""
        return replace(
            self,
            offered=self.offered.copy(),
            reached=self.reached.copy(),
            kept=self.kept.copy(),
            on_alarm=None,
        )

    def since(self, earlier: "Acceptance") -> "Acceptance":
        """What was counted after `earlier`, a copy of these counts."""
        return Acceptance(
            self.offered - earlier.offered,
            self.reached - earlier.reached,
            self.kept - earlier.kept,
            self.steps - earlier.steps,
        )

    @property
    def length(self) -> float:
        """Tokens that a step with drafts gives on average, NaN without one."""
        return 1 + int(self.kept.sum()) / self.steps if self.steps else float("nan")

    @property
    def conditional(self) -> np.ndarray:
        """Share of drafts that are kept once all before them are, [g]; NaN where none was."""
        with np.errstate(invalid="ignore"):
            return self.kept / self.reached

    def counts(self) -> dict[str, Any]:
        """The counts as plain JSON values; a list has a number for each place."""
        return {
            "verify_steps": self.steps,
            "offered_by_place": self.offered.tolist(),
            "reached_by_place": self.reached.tolist(),
            "kept_by_place": self.kept.tolist(),
        }

    def rates(self) -> dict[str, Any]:
        """The rates as plain JSON values; one of nothing is None.

        Returns:
            `offered_per_step` and `tokens_per_step` of a sequence's step with drafts, and by place
            the share that was kept of all drafts (`kept_of_offered`) and of those before which all
            were kept (`kept_of_reached`).
        """
        drafts, kept = int(self.offered.sum()), int(self.kept.sum())
        return {
            "offered_per_step": _ratio(drafts, self.steps),
            "tokens_per_step": _ratio(self.steps + kept, self.steps),
            "kept_of_offered": list(map(_ratio, self.kept.tolist(), self.offered.tolist())),
            "kept_of_reached": list(map(_ratio, self.kept.tolist(), self.reached.tolist())),
        }

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


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
