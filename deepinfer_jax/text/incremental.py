"""Text that arrives piece by piece: characters from token bytes, and matching of patterns."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer_jax.errors import RequestError
from deepinfer_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns token ids into text as they come, holding back bytes of an unfinished character.

    The texts returned, joined, equal the decoding of all bytes at once. Bytes that can never
    become a character give U+FFFD; a character cut off at the end gives one in `finish` only.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that these ids complete. Raises RequestError for an id outside the vocabulary."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def finish(self) -> str:
        """The rest: U+FFFD for bytes of an unfinished character, else nothing."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True)
class Pattern:
    """Symbols to find: single characters, or the spelling of a special token as one symbol.

    With `newlines_before`, newlines directly before them belong to the match.
    """

    symbols: tuple[str, ...]
    newlines_before: bool = False


class Scanner:
    """Looks for several patterns at once, symbol by symbol, in constant time per symbol.

    The pattern that is complete first wins; of those completed by the same symbol, the first in
    the list. Partial matches are tracked as in the Knuth-Morris-Pratt search.
    """

    def __init__(self, patterns: Sequence[Pattern]):
        self._patterns = tuple(patterns)
        self._borders = tuple(_borders(p.symbols) for p in patterns)
        starts = {p.symbols[0] for p in patterns}
        if any(p.newlines_before for p in patterns):
            starts.add("\n")
        self._starts = frozenset(starts)
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self._matched = [0] * len(self._patterns)
        self._newlines = [0] * len(self._patterns)
        self.held = 0

    held: int
    """How many of the last symbols may belong to a match that is not complete yet."""

    def passes(self, text: str) -> bool:
        """No symbol seen is held and none of `text` can start a match: it needs no scanning."""
        return self.held == 0 and self._starts.isdisjoint(text)

    def step(self, symbol: str) -> tuple[int, int] | None:
        """Take one symbol; index of the pattern it completes and the match's length, or None."""
        held = 0
        for i, pattern in enumerate(self._patterns):
            symbols, borders = pattern.symbols, self._borders[i]
            matched, newlines = self._matched[i], self._newlines[i]
            while matched and symbol != symbols[matched]:
                matched, newlines = borders[matched - 1], 0
            if symbol == symbols[matched]:
                matched += 1
                if matched == len(symbols):
                    return i, matched + newlines
            else:
                newlines = newlines + 1 if symbol == "\n" and pattern.newlines_before else 0
            self._matched[i], self._newlines[i] = matched, newlines
            held = max(held, matched + newlines)
        self.held = held
        return None


class StopMatcher:
    """Finds stop strings in growing text and holds back what may turn out to belong to one.

    Attributes:
        matched: the stop string found, or None. The text ends before it.
    """

    def __init__(self, stops: Sequence[str]):
        check_stops(stops)
        self._stops = tuple(stops)
        self._scanner = Scanner([Pattern(tuple(stop)) for stop in stops])
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is now certain to stand before any stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        if self._scanner.passes(text):
            return text
        begin, self._pending = len(self._pending), self._pending + text
        for at in range(begin, len(self._pending)):
            found = self._scanner.step(self._pending[at])
            if found is not None:
                index, length = found
                self.matched = self._stops[index]
                out, self._pending = self._pending[: at + 1 - length], ""
                return out
        cut = len(self._pending) - self._scanner.held
        out, self._pending = self._pending[:cut], self._pending[cut:]
        return out

    def finish(self) -> str:
        """The text still held back, at the end of the output."""
        out, self._pending = self._pending, ""
        return out


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stop strings that cannot be matched: RequestError for an empty one."""
    for i, stop in enumerate(stops):
        if not stop or isinstance(stops, str):
            raise RequestError(
                f"stop[{i}] of {len(stops)} is {stop!r} in {stops!r}.",
                "Stop strings come as a list, and an empty one would match everywhere.",
                "Pass a list of non-empty strings.",
            )


def _borders(symbols: tuple[str, ...]) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for symbol in symbols[1:]:
        k = borders[-1]
        while k and symbol != symbols[k]:
            k = borders[k - 1]
        borders.append(k + 1 if symbol == symbols[k] else 0)
    return tuple(borders)
