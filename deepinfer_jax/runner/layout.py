"""How the host writes a step's plan into two flat arrays, and the device reads it.

One int32 and one float32 array a step, whatever it holds: two transfers instead of twenty. For a
bucket of n rows, p parts and u page updates the int32 array is, in this order,

    ids      [n]                 token ids of prompt rows; 0 in rows whose token the device knows
    parts    [p, len(Part)]      see `Part`
    stops    [p, STOP_IDS]       token ids that end a sequence, -1 where there is none
    updates  [u, 3]              new page-table entries: (slot, place in the table, page)
    drafting [len(DraftWord)]     see `DraftWord`

and the float32 array [p, 2]: temperature and top_p of each part. No JAX here: the planner's half.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np

STOP_IDS = 8


class Part(IntEnum):
    """Columns of a part: the rows of one sequence in a step.

    SLOT: -1 for no part. OFFSET: its first row, read for prompts only: those of others follow from
    what is verified, which the device decides. COUNT: its rows; of a part that decodes, at most.
    START: position of its first row, read for prompts only; a decode part goes on where its
    sequence stands. FLAGS: see `Flag`.
    TOP_K, SEED_LOW, SEED_HIGH: of its draw. LIMIT: tokens, prompt included, that end it.
    WRITE_FROM, FLOOR: see `model.cache.Rows`. KEEP_FROM: first position that the decoder's layers
    run and their lowest window key. FORCED: the token that is written in place of a draw, or -1.
    SCORE_FROM: first position whose row is scored against the token after it, or -1; read for
    prompts only. NEXT: the token after the part's last row, where it is known, or -1.
    """

    SLOT = 0
    OFFSET = 1
    COUNT = 2
    START = 3
    FLAGS = 4
    TOP_K = 5
    SEED_LOW = 6
    SEED_HIGH = 7
    LIMIT = 8
    WRITE_FROM = 9
    FLOOR = 10
    KEEP_FROM = 11
    FORCED = 12
    SCORE_FROM = 13
    NEXT = 14


class DraftWord(IntEnum):
    """What a step does about drafts, a word each.

    VERIFIED: rows of drafts that it verifies, -1 for all that are offered. PROPOSES: 0 if it makes
    none for the next step; read by programs of varying lengths only.
    """

    VERIFIED = 0
    PROPOSES = 1


class Flag(IntFlag):
    """PROMPT: the host gives its ids. DRAWS: a token is drawn after its last row."""

    PROMPT = 1
    DRAWS = 2


@dataclass(frozen=True, order=True)
class Bucket:
    """Static sizes of one step program.

    Attributes:
        rows: of the step; decoder_rows: of them that the decoder's layers run at most.
        parts: sequences. updates: page-table entries.
        drafts: tokens that a sequence can have verified at most.
    """

    rows: int
    decoder_rows: int
    parts: int
    updates: int
    drafts: int = 0

    @property
    def ints(self) -> int:
        """Length of the int32 array."""
        return self.rows + self.parts * (len(Part) + STOP_IDS) + self.updates * 3 + len(DraftWord)

    @property
    def width(self) -> int:
        """Tokens that a sequence can get in one step at most."""
        return 1 + self.drafts

    @property
    def draws(self) -> int:
        """Rows after which a token is drawn, at most."""
        return min(self.rows, self.parts * self.width)

    def split(self, flat: Any) -> tuple[Any, Any, Any, Any, Any]:
        """ids [n], parts [p, .], stops [p, .], updates [u, 3], drafting.

        Of a NumPy array they are views, of a traced one slices.
        """
        parts = self.rows, self.rows + self.parts * len(Part)
        stops = parts[1], parts[1] + self.parts * STOP_IDS
        return (
            flat[: self.rows],
            flat[slice(*parts)].reshape(self.parts, len(Part)),
            flat[slice(*stops)].reshape(self.parts, STOP_IDS),
            flat[stops[1] : -len(DraftWord)].reshape(self.updates, 3),
            flat[-len(DraftWord) :],
        )

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Both arrays of a step that does nothing."""
        ints: Any = np.zeros(self.ints, np.int32)
        _, parts, stops, updates, drafting = self.split(ints)
        parts[:, [Part.SLOT, Part.TOP_K, Part.FORCED, Part.SCORE_FROM, Part.NEXT]] = -1
        stops[:], updates[:, 0] = -1, -1
        drafting[:] = -1, 1
        floats = np.zeros((self.parts, 2), np.float32)
        floats[:, 1] = 1.0
        return ints, floats


class ProgramKey(NamedTuple):
    """Which step program: its sizes, its top log-probs, and those of scored prompt rows or None."""

    bucket: Bucket
    top: int = 0
    prompt: int | None = None
