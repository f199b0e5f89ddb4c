"""The live line on standard error: what is being done while something long runs.

On a terminal it is one line with a spinner, which leaves nothing behind; elsewhere it is one plain
line at every change of phase, and one every 30 seconds of a long one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.status import Status

_EVERY_S = 30.0
_PHASES = {"digest": "reading and hashing weights", "load": "loading weights"}
_COMPILED = "compiled "


class Live:
    """The line; a context manager, and silent when `quiet`."""

    def __init__(self, quiet: bool = False, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._quiet, self._terminal = quiet, self._console.is_terminal
        self._status: Status | None = None
        self._phase, self._told = "", 0.0

    def __enter__(self) -> "Live":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def doing(self, phase: str, detail: str = "") -> None:
        """Say what is being done from now on; `detail` may change often within a phase."""
        text = f"{phase} {detail}".rstrip()
        if self._quiet:
            return
        if self._terminal:
            if self._status is None:
                self._status = self._console.status(text)
                self._status.start()
            else:
                self._status.update(text)
        elif phase != self._phase or time.monotonic() - self._told >= _EVERY_S:
            self._print(text)
        self._phase = phase

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._print(text)

    def clear(self) -> None:
        """Remove the line, before other output goes to the terminal."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._phase = ""

    def report(self, what: str, done: float, total: float) -> None:
        """Show what `LLM` reports: bytes of loading, and each program once it is compiled."""
        if what.startswith(_COMPILED):
            text = f"{what} in {done:.1f} s"
            if not self._terminal:
                self.note(text)
            elif self._status is not None:  # else an answer is being printed, not to be torn
                self.doing(self._phase, f"({text})")
            return
        detail = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if self._terminal else ""
        self.doing(_PHASES.get(what, what), detail)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._told = time.monotonic()


@contextmanager
def loading(quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """The live line of the phases of loading."""
    with Live(quiet) as live:
        yield live.report
