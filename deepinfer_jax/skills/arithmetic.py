"""Sums and differences: column by column in thinking mode, directly otherwise.

The worked form first lists the columns under labels (a is the rightmost), then goes through them
from the right; every step then needs only digits that stand beside a label it has just written.
"""

import numpy as np

from deepinfer_jax.skills.draws import between, chance, pick, ramp
from deepinfer_jax.skills.sample import Sample, Split, admits, assistant, user

_QUESTIONS = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b} =",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b} =",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "What is {a} minus {b}?",
    ),
}
_LABELS = "abcdefghij"
_WORKED_DIGITS = 6
_DIRECT_DIGITS = 3


def worked(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A sum or difference with worked columns, 1-2 digits at level 0 and 1-6 at level 1."""
    a, sign, b = operands(rng, ramp(level, 2, _WORKED_DIGITS), split)
    return _sample("sum_worked", rng, a, sign, b, reasoning(a, sign, b))


def direct(rng: np.random.Generator, level: float, split: Split) -> Sample:
    """A sum or difference answered at once, 1 digit at level 0 and 1-3 at level 1."""
    a, sign, b = operands(rng, ramp(level, 1, _DIRECT_DIGITS), split)
    return _sample("sum_direct", rng, a, sign, b, "")


def operands(rng: np.random.Generator, digits: int, split: Split | None) -> tuple[int, str, int]:
    """Two numbers of 1..`digits` digits and a sign; a difference is never negative."""
    while True:
        a, b = _number(rng, digits), _number(rng, digits)
        sign = "+" if chance(rng, 0.5) else "-"
        if sign == "-" and b > a:
            a, b = b, a
        if admits(split, f"{a}{sign}{b}"):
            return a, sign, b


def result(a: int, sign: str, b: int) -> int:
    """a + b or a - b."""
    return a + b if sign == "+" else a - b


def reasoning(a: int, sign: str, b: int) -> str:
    """The worked columns of a + b or a - b (a >= b), one line each.

    Lines of an addition end in the column's sum as two digits (the first is the carry); lines of
    a subtraction end in the digit and whether ten was borrowed.
    """
    width = max(len(str(a)), len(str(b)))
    tops, bottoms = str(a).zfill(width), str(b).zfill(width)
    lines = [
        f"{_LABELS[width - 1 - i]}{x}{sign}{y}"
        for i, (x, y) in enumerate(zip(tops, bottoms, strict=True))
    ]
    carry = 0
    for i in range(width):
        x, y = int(tops[-1 - i]), int(bottoms[-1 - i])
        line = f"{_LABELS[i]}{x}{sign}{y}{sign}{carry}="
        if sign == "+":
            lines.append(f"{line}{x + y + carry:02d}")
            carry = (x + y + carry) // 10
        else:
            digit = x - y - carry
            carry = int(digit < 0)
            lines.append(f"{line}{digit % 10} borrow {carry}")
    return "\n".join(lines)


def _number(rng: np.random.Generator, digits: int) -> int:
    size = between(rng, 1, digits)
    return between(rng, 10 ** (size - 1) if size > 1 else 0, 10**size - 1)


def _sample(skill: str, rng: np.random.Generator, a: int, sign: str, b: int, steps: str) -> Sample:
    answer = str(result(a, sign, b))
    question = pick(rng, _QUESTIONS[sign]).format(a=a, b=b)
    return Sample(
        skill=skill,
        kind="add" if sign == "+" else "sub",
        messages=(user(question), assistant(answer, steps)),
        answer=answer,
        thinking=bool(steps),
    )
