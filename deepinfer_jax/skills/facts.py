"""Questions about this engine: every topic in several trained wordings and two held-out ones."""

import numpy as np

from deepinfer_jax.skills.draws import chance, pick
from deepinfer_jax.skills.engine_facts import FACTS
from deepinfer_jax.skills.sample import Sample, Split, assistant, user

WORDINGS: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {x}?",
        "Explain {x}.",
        "Tell me about {x}.",
        "What does {x} mean?",
        "Describe {x}.",
        "Define {x}.",
        "{x}?",
        "In short, what is {x}?",
        "What do you know about {x}?",
    ),
    "value": (
        "What is {x}?",
        "Tell me {x}.",
        "State {x}.",
        "Give {x}.",
        "Do you know {x}?",
        "{x}?",
        "In short, what is {x}?",
        "What is the value of {x}?",
    ),
    "number": (
        "How many {x} are there?",
        "How many {x}?",
        "What is the number of {x}?",
        "Give the number of {x}.",
        "Tell me the number of {x}.",
        "{x}: how many?",
        "Count the {x}.",
    ),
    "why": (
        "Why {x}?",
        "Why do we {x}?",
        "Explain why we {x}.",
        "For what reason do we {x}?",
        "Tell me why we {x}.",
        "Why does one {x}?",
        "In short, why {x}?",
    ),
    "how": (
        "How do we {x}?",
        "How to {x}?",
        "Explain how to {x}.",
        "Tell me how to {x}.",
        "In short, how do we {x}?",
        "How does one {x}?",
    ),
    "who": (
        "Who are {x}?",
        "What are {x}?",
        "Tell me who {x} are.",
        "Explain who {x} are.",
        "In short, who are {x}?",
        "Hello, who are {x}?",
    ),
}
"""Form -> wordings that training uses; x is the topic."""

HELD_OUT_WORDINGS: dict[str, tuple[str, str]] = {
    "what": ("Can you say what {x} is?", "Please explain {x} to me."),
    "value": ("Can you say what {x} is?", "I want to know {x}."),
    "number": ("Can you say how many {x} there are?", "I want to know the number of {x}."),
    "why": ("Can you say why we {x}?", "I want to know why we {x}."),
    "how": ("Can you say how to {x}?", "I want to know how we {x}."),
    "who": ("Can you say who {x} are?", "I want to know who {x} are."),
}
"""Form -> the two wordings that training never uses."""


def fact(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A question about the engine; `split` chooses the wordings, the difficulty does not vary."""
    form, topic, answer = pick(rng, FACTS)
    return _sample(rng, form, topic, answer, split)


def question(index: int, split: Split, thinking: bool) -> Sample:
    """The `index`-th (topic, wording) pair of a split, cyclically; topics change fastest."""
    form, topic, answer = FACTS[index % len(FACTS)]
    wordings = WORDINGS[form] if split == "train" else HELD_OUT_WORDINGS[form]
    wording = wordings[(index // len(FACTS)) % len(wordings)]
    return _build(form, _capital(wording.format(x=topic)), answer, thinking)


def _sample(rng: np.random.Generator, form: str, topic: str, answer: str, split: Split) -> Sample:
    wordings = WORDINGS[form] if split == "train" else HELD_OUT_WORDINGS[form]
    wording = pick(rng, wordings)
    if split == "train":
        style = float(rng.random())
        if style < 0.1:
            wording = wording[:1].lower() + wording[1:]
        elif style < 0.2:
            wording = wording.rstrip("?.")
    text = _capital(wording.format(x=topic)) if wording[0] == "{" else wording.format(x=topic)
    return _build(form, text, answer, chance(rng, 0.5))


def _build(form: str, text: str, answer: str, thinking: bool) -> Sample:
    return Sample(
        skill="facts",
        kind=form,
        messages=(user(text), assistant(answer)),
        answer=answer,
        thinking=thinking,
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
