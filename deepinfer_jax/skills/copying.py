"""Dense copying, for training only: repeat entries or words, recall by neighbour, number or key.

Answers exercise every vocabulary entry, which the other skills' answers do too rarely.
"""

from collections.abc import Sequence

import numpy as np

from deepinfer_jax.skills.draws import between, chance, distinct, pick, ramp
from deepinfer_jax.skills.sample import Message, Sample, Split, assistant, user
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS

_POOLS = (NOUNS, NAMES, CITIES, ADJECTIVES)
_LONGEST = 20
_LONGEST_LIST = 10


def copying(
    rng: np.random.Generator, level: float, split: Split, vocabulary: Sequence[str] = ()
) -> Sample:
    """A copy task; lengths grow from 4 at level 0 to 20 (lists: 10) at level 1.

    With a `vocabulary` (texts of the tokenizer's entries) a third of the tasks repeat entries
    drawn uniformly from it.
    """
    if vocabulary and chance(rng, 0.34):
        count = between(rng, 2, ramp(level, 4, _LONGEST))
        text = "".join(pick(rng, vocabulary) for _ in range(count))
        return _sample("entries", [(f"Repeat:\n{text}", text)])
    makers = (_line, _lines, _digits, _neighbours, _numbered, _keyed)
    return pick(rng, makers)(rng, level)


def _line(rng: np.random.Generator, level: float) -> Sample:
    words = _words(rng, between(rng, 2, ramp(level, 4, _LONGEST)))
    text = " ".join(words)
    return _sample("line", [(f"Repeat: {text}", text)])


def _lines(rng: np.random.Generator, level: float) -> Sample:
    text = "\n".join(_words(rng, between(rng, 2, ramp(level, 4, _LONGEST))))
    return _sample("lines", [(f"Repeat:\n{text}", text)])


def _digits(rng: np.random.Generator, level: float) -> Sample:
    count = between(rng, 2, ramp(level, 4, _LONGEST))
    text = "".join(map(str, rng.integers(0, 10, count).tolist()))
    return _sample("digits", [(f"Repeat: {text}", text)])


def _neighbours(rng: np.random.Generator, level: float) -> Sample:
    words = distinct(rng, pick(rng, _POOLS), between(rng, 3, ramp(level, 4, _LONGEST_LIST)))
    turns = [(f"After {words[i]}?", words[i + 1]) for i in _places(rng, len(words) - 1)]
    return _sample("neighbours", turns, ", ".join(words))


def _numbered(rng: np.random.Generator, level: float) -> Sample:
    words = distinct(rng, pick(rng, _POOLS), between(rng, 3, ramp(level, 4, 9)))
    turns = [(f"Number {i + 1}?", words[i]) for i in _places(rng, len(words))]
    return _sample("numbered", turns, ", ".join(words))


def _keyed(rng: np.random.Generator, level: float) -> Sample:
    count = between(rng, 2, ramp(level, 3, _LONGEST_LIST))
    keys = distinct(rng, pick(rng, _POOLS), count)
    values = _words(rng, count)
    shown = "\n".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True))
    turns = [(f"{keys[i]}?", values[i]) for i in _places(rng, count)]
    return _sample("keyed", turns, shown)


def _words(rng: np.random.Generator, count: int) -> list[str]:
    pool = pick(rng, _POOLS)
    return [pool[i] for i in rng.integers(0, len(pool), count).tolist()]


def _places(rng: np.random.Generator, count: int) -> list[int]:
    return rng.permutation(count)[:4].tolist()


def _sample(kind: str, turns: list[tuple[str, str]], shown: str = "") -> Sample:
    messages: list[Message] = []
    for i, (asked, answer) in enumerate(turns):
        messages.append(user(f"{shown}\n\n{asked}" if shown and i == 0 else asked))
        messages.append(assistant(answer))
    return Sample(skill="copy", kind=kind, messages=tuple(messages), answer=turns[-1][1])
