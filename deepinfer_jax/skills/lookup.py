"""Lookup of facts in documents: short documents with several questions, long ones, and single
questions at a chosen distance.
"""

import numpy as np

from deepinfer_jax.skills.documents import (
    FILLER_TOKENS,
    Fact,
    about_tokens,
    draw_facts,
    draw_filler,
    shuffled,
)
from deepinfer_jax.skills.draws import between, chance, pick
from deepinfer_jax.skills.sample import Message, Sample, Split, assistant, user

_SHORT = 880  # tokens of the longest document in a short row
_ALL_FACTS_MOST = 4
_MOST_QUESTIONS = 6
_QUESTION_TOKENS = 14  # the question, its separator and the assistant's header


def lookup(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A document of 2-4 facts at level 0, up to 880 tokens at level 1, and 1-6 questions.

    Sizes below the level's limit stay in the mixture, evenly in the logarithm; held-out samples
    ask one question.
    """
    longest = 30 * (_SHORT / 30) ** min(max(level, 0.0), 1.0)
    tokens = int(30 * (longest / 30) ** float(rng.random()))
    if tokens < 60:
        facts, filler = draw_facts(rng, between(rng, 2, _ALL_FACTS_MOST)), []
    else:
        facts, filler = _contents(rng, tokens)
    asked = 1 if split == "held_out" else between(rng, 1, min(_MOST_QUESTIONS, len(facts)))
    document = " ".join(shuffled(rng, facts, filler))
    return _conversation(rng, document, facts[:asked], chance(rng, 0.3))


def long_document(
    rng: np.random.Generator, tokens: int, questions: int, thinking: bool = False
) -> Sample:
    """A document of about `tokens` tokens and up to `questions` questions spread over it.

    Facts stand everywhere, so the distance from question to value is spread evenly; questions
    come in random order.
    """
    facts, filler = _contents(rng, tokens, least=questions)
    document = " ".join(shuffled(rng, facts, filler))
    return _conversation(rng, document, facts[:questions], thinking)


def at_distance(
    rng: np.random.Generator, kind: str, low: int, high: int, longest: int = 3800
) -> Sample:
    """One question for a `kind` value that lies about low..high tokens before the answer.

    The document has about max(200, low)..`longest` tokens.
    """
    while True:
        tokens = between(rng, max(200, low + 150), longest - 60)
        facts, filler = _contents(rng, tokens, least=6)
        sentences = shuffled(rng, facts, filler)
        after = np.cumsum([about_tokens(s) for s in sentences[::-1]])[::-1] + _QUESTION_TOKENS
        places = np.flatnonzero((after >= low + 12) & (after < high - 8)).tolist()
        wanted = next((f for f in facts if f.kind == kind), None)
        if wanted is not None and places:
            break
    place, old = pick(rng, places), sentences.index(wanted.sentence)
    sentences[place], sentences[old] = sentences[old], sentences[place]
    return _conversation(rng, " ".join(sentences), [wanted], thinking=False)


def _contents(
    rng: np.random.Generator, tokens: int, least: int = 2
) -> tuple[list[Fact], list[str]]:
    """Facts and filler of about `tokens` tokens; the share of facts varies from few to half."""
    sentences = max(int(tokens / FILLER_TOKENS), least)
    most = max(least, min(sentences // 2, 160))
    count = int(least * (most / least) ** float(rng.random()))
    facts = draw_facts(rng, count)
    rest = tokens - sum(about_tokens(f.sentence) for f in facts)
    return facts, draw_filler(rng, max(0, round(rest / FILLER_TOKENS)))


def _conversation(
    rng: np.random.Generator, document: str, asked: list[Fact], thinking: bool
) -> Sample:
    messages: list[Message] = []
    for i, fact in enumerate(asked):
        question = fact.question(rng)
        messages.append(user(question if i else f"{document}\n\n{question}"))
        messages.append(assistant(fact.sentence))
    last = asked[-1]
    return Sample(
        skill="lookup",
        kind=last.kind,
        messages=tuple(messages),
        answer=last.sentence,
        thinking=thinking,
        needle=last.sentence,
        value=last.value,
    )
