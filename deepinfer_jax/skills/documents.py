"""Documents of short facts about people, in filler prose, with questions that ask for one fact.

A fact's key and attribute stand within three words before its value, and the answer repeats the
fact's sentence, so that the value is asked for in the very words that precede it in the text.
"""

import re
from dataclasses import dataclass

import numpy as np

from deepinfer_jax.skills.draws import pick
from deepinfer_jax.skills.words import (
    ADJECTIVES,
    CITIES,
    GROUPS,
    NAMES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)

KINDS = ("code", "city", "pair")
"""Kinds of value: a five-digit code, a city, an adjective with a noun."""

FILLER_TOKENS = 8.4
"""Mean number of tokens of a filler sentence."""

_SENTENCES = {
    "code": "The code of {name} is {value}.",
    "city": "{name} lives in {value}.",
    "pair": "{name} leads project {value}.",
}
_QUESTIONS = {
    "code": ("What is the code of {name}?", "Tell me the code of {name}.", "{name}'s code?"),
    "city": (
        "Where does {name} live?",
        "Tell me where {name} lives.",
        "In which city does {name} live?",
    ),
    "pair": (
        "Which project does {name} lead?",
        "Tell me which project {name} leads.",
        "What project does {name} lead?",
    ),
}
_TOKEN = re.compile(r"[A-Za-z]+|[^A-Za-z\s]|\s(?=\d)")
_FILLERS = (
    "The {group} {verb} the {adjective} {noun} {time}.",
    "The {noun} near the {place} was {adjective}.",
    "Some {group} {verb} a {noun} in the {place}.",
    "A {adjective} {noun} stood by the {place} {time}.",
    "{name} {verb} the {noun} {time}.",
    "{name} and the {group} {verb} a {adjective} {place}.",
    "The {place} was {adjective} {time}.",
    "Nobody {verb} the {noun} of the {group}.",
)


@dataclass(frozen=True)
class Fact:
    """One retrievable statement: who, what kind of value, and the value."""

    kind: str
    name: str
    value: str

    @property
    def sentence(self) -> str:
        """The statement as the document gives it; also the answer to its question."""
        return _SENTENCES[self.kind].format(name=self.name, value=self.value)

    def question(self, rng: np.random.Generator) -> str:
        """One of the ways to ask for the value."""
        return pick(rng, _QUESTIONS[self.kind]).format(name=self.name)


def values(text: str, kind: str) -> set[str]:
    """All values of a kind that sentences of `text` state."""
    pattern = re.escape(_SENTENCES[kind]).replace(r"\{name\}", r"\w+")
    return set(re.findall(pattern.replace(r"\{value\}", r"([\w ]+)"), text))


def draw_facts(rng: np.random.Generator, count: int) -> list[Fact]:
    """`count` facts whose (kind, name) differ; codes differ too. At most 3 x 194 facts."""
    keys = rng.permutation(len(KINDS) * len(NAMES))[:count].tolist()
    codes = _distinct_codes(rng, count)
    cities = rng.integers(0, len(CITIES), count).tolist()
    firsts = rng.integers(0, len(ADJECTIVES), count).tolist()
    seconds = rng.integers(0, len(NOUNS), count).tolist()
    facts = []
    for i, key in enumerate(keys):
        kind = KINDS[key % len(KINDS)]
        value = {
            "code": str(10_000 + int(codes[i])),
            "city": CITIES[cities[i]],
            "pair": f"{ADJECTIVES[firsts[i]]} {NOUNS[seconds[i]]}",
        }[kind]
        facts.append(Fact(kind, NAMES[key // len(KINDS)], value))
    return facts


def draw_filler(rng: np.random.Generator, count: int) -> list[str]:
    """`count` sentences that state no fact; some name a person."""
    lists = (GROUPS, VERBS, ADJECTIVES, NOUNS, TIMES, PLACES, NAMES)
    sizes = np.array([len(_FILLERS), *map(len, lists)])
    rows = (rng.random((count, len(sizes))) * sizes).astype(np.int64).tolist()
    sentences = []
    for template, group, verb, adjective, noun, time, place, name in rows:
        sentences.append(
            _FILLERS[template].format(
                group=GROUPS[group],
                verb=VERBS[verb],
                adjective=ADJECTIVES[adjective],
                noun=NOUNS[noun],
                time=TIMES[time].replace("_", " "),
                place=PLACES[place],
                name=NAMES[name],
            )
        )
    return sentences


def shuffled(rng: np.random.Generator, facts: list[Fact], filler: list[str]) -> list[str]:
    """All sentences of a document in random order."""
    sentences = [fact.sentence for fact in facts] + filler
    return [sentences[i] for i in rng.permutation(len(sentences)).tolist()]


def about_tokens(text: str) -> int:
    """Tokens of a text when every word is one token; digits count singly."""
    return len(_TOKEN.findall(text))


def _distinct_codes(rng: np.random.Generator, count: int) -> list[int]:
    codes: dict[int, None] = {}
    while len(codes) < count:
        codes |= dict.fromkeys(rng.integers(0, 90_000, count).tolist())
    return list(codes)[:count]
