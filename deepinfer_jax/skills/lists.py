"""Sorting, reversing and counting of words and of two-digit numbers."""

import numpy as np

from deepinfer_jax.skills.draws import between, chance, distinct, pick, ramp
from deepinfer_jax.skills.sample import Sample, Split, admits, assistant, user
from deepinfer_jax.skills.words import CITIES, NAMES, NOUNS

_NUMBERS = tuple(str(n) for n in range(10, 100))
_SORT = {
    "words": ("Sort these words: {x}", "Sort alphabetically: {x}", "Put in order: {x}"),
    "numbers": ("Sort these numbers: {x}", "Sort in increasing order: {x}", "Put in order: {x}"),
}
_REVERSE = ("Reverse this list: {x}", "Reverse the order: {x}", "Write backwards: {x}")
_COUNT = {
    "words": ("How many words are here: {x}", "Count these words: {x}"),
    "numbers": ("How many numbers are here: {x}", "Count these numbers: {x}"),
}
_FULL = 8
_LONGEST_COUNT = 9


def sort(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A list to sort, 3 members at level 0 and 3-8 at level 1."""
    kind = _kind(rng)
    items = draw_items(rng, kind, ramp(level, 3, _FULL), split, sortable=True)
    return _sample(rng, "sort", kind, _SORT[kind], items, sorted_text(items))


def reverse(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A list to reverse, 3 members at level 0 and 3-8 at level 1."""
    kind = _kind(rng)
    items = draw_items(rng, kind, ramp(level, 3, _FULL), split)
    return _sample(rng, "reverse", kind, _REVERSE, items, reversed_text(items))


def count(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A list to count, up to 4 members at level 0 and 9 at level 1."""
    kind = _kind(rng)
    items = draw_items(rng, kind, ramp(level, 4, _LONGEST_COUNT), split, shortest=1)
    return _sample(rng, "count", kind, _COUNT[kind], items, str(len(items)))


def draw_items(
    rng: np.random.Generator,
    kind: str,
    longest: int,
    split: Split | None,
    *,
    shortest: int = 3,
    sortable: bool = False,
) -> list[str]:
    """Distinct members, `shortest`..`longest` of them; `sortable` words come from one list."""
    while True:
        pool = _NUMBERS
        if kind == "words":
            pool = NOUNS if sortable else pick(rng, (NOUNS, NOUNS, NAMES, CITIES))
        items = distinct(rng, pool, between(rng, shortest, longest))
        if admits(split, " ".join(items)):
            return items


def sorted_text(items: list[str]) -> str:
    """The answer to a request to sort."""
    return "Sorted: " + ", ".join(sorted(items))


def reversed_text(items: list[str]) -> str:
    """The answer to a request to reverse."""
    return "Reversed: " + ", ".join(items[::-1])


def _kind(rng: np.random.Generator) -> str:
    return "words" if chance(rng, 0.5) else "numbers"


def _sample(
    rng: np.random.Generator,
    skill: str,
    kind: str,
    questions: tuple[str, ...],
    items: list[str],
    answer: str,
) -> Sample:
    question = pick(rng, questions).format(x=", ".join(items))
    return Sample(
        skill=skill,
        kind=kind,
        messages=(user(question), assistant(answer)),
        answer=answer,
        thinking=chance(rng, 0.3),
    )
