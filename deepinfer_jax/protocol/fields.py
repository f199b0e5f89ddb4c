"""Reading the members of a JSON object: each is checked, and none is ignored."""

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_jax.errors import RequestError

Check = Callable[[str, Any], Any]
_SHOWN = 80  # characters of a value that an error repeats


def read(
    where: str,
    value: Any,
    known: Mapping[str, Check],
    refused: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Any]:
    """The checked members of `value`, without those that are null.

    Args:
        where: names the object in errors.
        known: member -> check, called with the member's name and value; returns the value to use.
        refused: member -> (why, what to do) of members that are known and never served.

    Raises RequestError, naming the member, for a value that is no object, a member that is not
    known, and whatever a check refuses.
    """
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{where} is {shown(value)}.",
            "It must be a JSON object.",
            "Send an object with members such as " + ", ".join(list(known)[:2]) + ".",
        )
    found = {}
    for name, member in value.items():
        if member is None:
            continue
        if name in known:
            found[name] = known[name](name, member)
        elif refused is not None and name in refused:
            why, do = refused[name]
            raise RequestError(f"{where} sets {name} to {shown(member)}.", why, do)
        else:
            near = difflib.get_close_matches(str(name), known, 1)
            raise RequestError(
                f"{where} has the member {name!r}, which is not known.",
                "A member that is ignored could change what is asked for without a trace.",
                f"Did you mean {near[0]!r}?" if near else "Leave it out.",
            )
    return found


def require(where: str, found: Mapping[str, Any], name: str) -> Any:
    """The member `name` of what `read` found. Raises RequestError when it is missing."""
    if name not in found:
        raise RequestError(
            f"{where} has no member {name!r}.",
            "The request means nothing without it.",
            f"Add {name}.",
        )
    return found[name]


def shown(value: Any) -> str:
    """A value as errors repeat it: JSON, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def integer(low: int, high: int) -> Check:
    """An integer in low..high; a boolean is none."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(name, value, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A number in [low, high], or in (low, high] with `above`."""

    def check(name: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not low <= value <= high or (above and value == low):
            start = f"above {low}" if above else f"from {low}"
            raise _wrong(name, value, f"a number {start} {'up ' if above else ''}to {high}")
        return float(value)

    return check


def instance(kind: type, wanted: str) -> Check:
    """A value of one JSON type; `wanted` names it in errors."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong(name, value, wanted)
        return value

    return check


def one_of(*values: str) -> Check:
    """One of these texts."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise _wrong(name, value, "one of " + ", ".join(values))
        return value

    return check


def only(neutral: Any, why: str, check: Check | None = None) -> Check:
    """The one value that asks for nothing; `check` says first what a legal value is."""

    def checked(name: str, value: Any) -> Any:
        if check is not None:
            check(name, value)
        if isinstance(value, bool) != isinstance(neutral, bool) or value != neutral:
            raise RequestError(
                f"{name} is {shown(value)}.", why, f"Leave it out; {shown(neutral)} is accepted."
            )
        return value

    return checked


def strings(most: int) -> Check:
    """A non-empty text, or a list of at most `most` of them; gives a tuple."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        texts = isinstance(listed, list) and all(isinstance(s, str) and s for s in listed)
        if not texts or len(listed) > most:
            count = f", of {len(listed)}" if isinstance(listed, list) else ""
            raise RequestError(
                f"{name} is {shown(value)}{count}.",
                f"It must be a text, or a list of at most {most} texts, none of them empty.",
                f"Send at most {most} texts with at least one character.",
            )
        return tuple(listed)

    return check


boolean = instance(bool, "true or false")
text = instance(str, "a text")
array = instance(list, "a list")
mapping = instance(dict, "an object")


def _wrong(name: str, value: Any, wanted: str) -> RequestError:
    return RequestError(
        f"{name} is {shown(value)}.", f"It must be {wanted}.", f"Set {name} to {wanted}."
    )
