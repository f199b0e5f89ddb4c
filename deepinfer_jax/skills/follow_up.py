"""Second questions that make sense only after the first: another attribute, another person, the
same list, something said about oneself, a sum to go on with.
"""

from typing import Literal

import numpy as np

from deepinfer_jax.skills import arithmetic, lists
from deepinfer_jax.skills.documents import KINDS, Fact, draw_facts, shuffled
from deepinfer_jax.skills.draws import between, chance, distinct, pick, ramp
from deepinfer_jax.skills.sample import Message, Sample, Split, admits, assistant, user
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS

_ATTRIBUTE = {
    "code": ("And the code?", "What is the code?"),
    "city": ("And the city?", "And where is the home?"),
    "pair": ("And the project?", "Which project is it?"),
}
_ORDINALS = ("first", "second", "third")


def follow_up(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A conversation of two or three turns whose last question refers to an earlier one."""
    makers = (_attribute, _person, _list, _member, _memory, _sum)
    while True:
        kind, thinking, messages, loss = pick(rng, makers)(rng, level)
        if admits(split, "\n".join(str(m["content"]) for m in messages)):
            break
    return Sample(
        skill="follow_up",
        kind=kind,
        messages=tuple(messages),
        answer=messages[-1]["content"],
        thinking=thinking,
        loss=loss,
    )


type _Loss = Literal["all", "final"]
type _Turns = tuple[str, bool, list[Message], _Loss]


def _few_facts(rng: np.random.Generator, level: float) -> tuple[list[Fact], list[str]]:
    """All three facts of 2-4 people in random order, and the names."""
    names = distinct(rng, NAMES, between(rng, 2, ramp(level, 2, 4)))
    values = draw_facts(rng, 12 * len(names))
    by_kind = {kind: [f.value for f in values if f.kind == kind] for kind in KINDS}
    if any(len(found) < len(names) for found in by_kind.values()):
        return _few_facts(rng, level)
    facts = [Fact(k, n, by_kind[k][i]) for i, n in enumerate(names) for k in KINDS]
    return facts, names


def _attribute(rng: np.random.Generator, level: float) -> _Turns:
    facts, names = _few_facts(rng, level)
    name = pick(rng, names)
    first, second = [f for f in distinct(rng, facts, len(facts)) if f.name == name][:2]
    return "attribute", *_two(rng, facts, first, second, pick(rng, _ATTRIBUTE[second.kind]))


def _person(rng: np.random.Generator, level: float) -> _Turns:
    facts, names = _few_facts(rng, level)
    kind = pick(rng, KINDS)
    first, second = [f for f in distinct(rng, facts, len(facts)) if f.kind == kind][:2]
    asked = pick(rng, ("And {name}?", "What about {name}?")).format(name=second.name)
    return "person", *_two(rng, facts, first, second, asked)


def _two(
    rng: np.random.Generator, facts: list[Fact], first: Fact, second: Fact, asked: str
) -> tuple[bool, list[Message], _Loss]:
    document = " ".join(shuffled(rng, facts, []))
    messages = [
        user(f"{document}\n\n{first.question(rng)}"),
        assistant(first.sentence),
        user(asked),
        assistant(second.sentence),
    ]
    return chance(rng, 0.3), messages, "all"


def _list(rng: np.random.Generator, level: float) -> _Turns:
    kind = pick(rng, ("words", "numbers"))
    items = lists.draw_items(rng, kind, ramp(level, 3, 6), None, sortable=True)
    first, second = ("Sort", "Reverse") if chance(rng, 0.5) else ("Reverse", "Sort")
    texts = {"Sort": lists.sorted_text, "Reverse": lists.reversed_text}
    done = texts[first](items)
    shown = done.split(": ")[1].split(", ")
    messages = [
        user(f"{first} these {kind}: {', '.join(items)}"),
        assistant(done),
        user(f"Now {second.lower()} them."),
        assistant(texts[second](shown)),
    ]
    return "list", chance(rng, 0.3), messages, "all"


def _member(rng: np.random.Generator, level: float) -> _Turns:
    items = lists.draw_items(rng, "words", ramp(level, 3, 6), None, sortable=True)
    done = lists.reversed_text(items) if chance(rng, 0.5) else lists.sorted_text(items)
    shown = done.split(": ")[1].split(", ")
    place = between(rng, 0, len(_ORDINALS))
    ordinal, word = ("last", shown[-1]) if place == 3 else (_ORDINALS[place], shown[place])
    asked = pick(rng, ("What is the {x} word?", "Which word is {x}?")).format(x=ordinal)
    messages = [
        user(f"{'Reverse' if done[0] == 'R' else 'Sort'} these words: {', '.join(items)}"),
        assistant(done),
        user(asked),
        assistant(f"The {ordinal} word is {word}."),
    ]
    return "member", chance(rng, 0.3), messages, "all"


def _memory(rng: np.random.Generator, level: float) -> _Turns:
    name, city = pick(rng, NAMES), pick(rng, CITIES)
    adjective, noun = pick(rng, ADJECTIVES), pick(rng, NOUNS)
    said = [
        (f"My name is {name}.", "What is my name?", f"Your name is {name}."),
        (f"I live in {city}.", "Where do I live?", f"You live in {city}."),
        (f"I have a {adjective} {noun}.", "What do I have?", f"You have a {adjective} {noun}."),
    ]
    told = distinct(rng, said, between(rng, 2, 3))
    questions = distinct(rng, told, between(rng, 1, len(told)))
    messages = [user(" ".join(s[0] for s in told)), assistant("I will remember that.")]
    for _, asked, answer in questions:
        messages += [user(asked), assistant(answer)]
    return "memory", chance(rng, 0.3), messages, "all"


def _sum(rng: np.random.Generator, level: float) -> _Turns:
    a, sign, b = arithmetic.operands(rng, ramp(level, 2, 4), None)
    total = arithmetic.result(a, sign, b)
    more = between(rng, 1, 10 ** ramp(level, 1, 3))
    second = "+" if more > total or chance(rng, 0.5) else "-"
    asked = f"Now add {more}." if second == "+" else f"Now subtract {more}."
    end = arithmetic.result(total, second, more)
    messages = [
        user(f"What is {a} {sign} {b}?"),
        assistant(str(total)),
        user(asked),
        assistant(str(end), arithmetic.reasoning(total, second, more)),
    ]
    return "sum", True, messages, "final"
