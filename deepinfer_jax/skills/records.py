"""Records to JSON: fields of a person, given in one of three notations, as one JSON object."""

import json
from typing import Any

import numpy as np

from deepinfer_jax.skills.draws import between, chance, distinct, pick, ramp
from deepinfer_jax.skills.sample import Sample, Split, admits, assistant, user
from deepinfer_jax.skills.words import ADJECTIVES, CITIES, NAMES, NOUNS

_FIELDS = ("age", "city", "code", "project", "pet", "active")
_ASKED = ("Write as JSON:", "Convert to JSON:", "Give this record as JSON:")


def record(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A record of a name and 2 further fields at level 0, up to 5 at level 1."""
    while True:
        fields = distinct(rng, _FIELDS, between(rng, 2, ramp(level, 2, 5)))
        values: dict[str, Any] = {"name": pick(rng, NAMES)}
        values |= {field: _value(rng, field) for field in fields}
        answer = json.dumps(values)
        if admits(split, answer):
            break
    ask = pick(rng, _ASKED)
    style = between(rng, 0, 2)
    texts = {key: str(value).lower() if key == "active" else value for key, value in values.items()}
    if style == 0:
        prompt = f"{ask} " + ", ".join(f"{k} {v}" for k, v in texts.items())
    elif style == 1:
        prompt = f"{ask} " + "; ".join(f"{k} = {v}" for k, v in texts.items())
    else:
        prompt = f"{ask}\n" + "\n".join(f"{k}: {v}" for k, v in texts.items())
    constrained = chance(rng, 0.25)
    return Sample(
        skill="json",
        kind="json_object" if constrained else "plain",
        messages=(user(prompt), assistant(answer)),
        answer=answer,
        thinking=chance(rng, 0.3),
        response_format={"type": "json_object"} if constrained else None,
    )


def _value(rng: np.random.Generator, field: str) -> Any:
    match field:
        case "age":
            return between(rng, 18, 79)
        case "city":
            return pick(rng, CITIES)
        case "code":
            return between(rng, 10000, 99999)
        case "project":
            return f"{pick(rng, ADJECTIVES)} {pick(rng, NOUNS)}"
        case "pet":
            return pick(rng, NOUNS)
        case _:
            return chance(rng, 0.5)
