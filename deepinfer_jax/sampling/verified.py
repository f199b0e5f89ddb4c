"""What became of the drafts of one step of one sequence, as plain values for statistics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifiedBlock:
    """Drafts of a sequence that one step verified.

    Attributes:
        offered: drafts that were verified, at least 1; the first ones of the block.
        accepted: of them, from the first on, those that were kept; one token more was emitted.
        logits: of the confidence of each of the block's g drafts, given that all before it are
            kept, before any temperature; None of a drafter without a confidence head.
        ended: the step's last token ended the sequence. Whether the draft in its place was the
            same token is not told, and those behind it were never compared.
    """

    offered: int
    accepted: int
    logits: tuple[float, ...] | None = None
    ended: bool = False

    @property
    def judged(self) -> int:
        """Drafts before which all were kept and of which it is told whether they were, too."""
        return self.accepted if self.ended else min(self.accepted + 1, self.offered)
