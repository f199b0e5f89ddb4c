"""The live line on standard error: what is being done while something long runs.

On a terminal it is one line with a spinner, and with a bar while the end is known, which leaves
nothing behind; elsewhere it is one plain line at every change of phase, and one every 30 seconds
of a long one.
"""

import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

_EVERY_S = 30.0
_LEAST_S = 1.0  # a speed measured in less says nothing about the time that is left
_PHASES = {"digest": "reading and hashing weights", "load": "loading weights"}
_COMPILED, _LATE, _ALARM = "compiled ", "compiled late", "alarm: "


class _Bar(BarColumn):
    """A bar where the end is known, and nothing elsewhere."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return super().render(task) if task.fields["known"] else Text()


class Live:
    """The line; a context manager, and silent when `quiet`."""

    def __init__(self, quiet: bool = False, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._quiet, self._terminal = quiet, self._console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._phase, self._since, self._told = "", 0.0, 0.0
        self._held: list[str] = []

    def __enter__(self) -> "Live":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()
        self._release()

    def doing(
        self,
        phase: str,
        detail: str = "",
        *,
        done: float | None = None,
        total: float | None = None,
        before: float = 0.0,
    ) -> None:
        """Say what is being done from now on.

        Args:
            phase: what; a new one starts the clock.
            detail: may change often within a phase.
            done, total: how much of the phase is behind, in any unit, when that is known: a bar
                on a terminal, and the time that is left if it goes on at this speed.
            before: how much of it was done when the phase began.
        """
        if self._quiet:
            return
        now = time.monotonic()
        changed = phase != self._phase
        if changed:
            self._phase, self._since = phase, now
        spent, made = now - self._since, (done or 0.0) - before
        if made > 0 and done and total and done < total and spent >= _LEAST_S:
            detail = f"{detail}, {clock(spent * (total - done) / made)} left".removeprefix(", ")
        if self._terminal:
            self._release()
            progress = self._shown()
            progress.update(
                self._task,
                description=phase,
                detail=detail,
                completed=done or 0,
                total=total or 1,
                known=bool(total),
            )
        elif changed or now - self._told >= _EVERY_S:
            self._print(f"{phase} {detail}".rstrip())

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._print(text)

    def clear(self) -> None:
        """Remove the line, before other output goes to the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._phase = ""

    def report(self, what: str, done: float, total: float) -> None:
        """Show what `LLM` reports: bytes of loading, and each program once it is compiled.

        A program that was missing after warm-up is a line that stays, and so is an alarm.
        """
        if what == "compile":
            self.doing("compiling", f"{done:.0f} of {total:.0f} programs", done=done, total=total)
            return
        if not what.startswith((_COMPILED, _ALARM)):
            size = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self.doing(_PHASES.get(what, what), size, done=done, total=total)
            return
        text = what if what.startswith(_ALARM) else f"{what} in {done:.1f} s"
        if not self._terminal:
            self.note(text)
        elif self._progress is not None and what.startswith((_LATE, _ALARM)):
            self.note(text)
        elif self._progress is not None:
            self.doing(self._phase, f"({text})")
        elif not self._quiet:
            self._held.append(text)  # an answer is being printed, and must not be torn

    def _shown(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                _Bar(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._progress.add_task("", detail="", known=False)
            self._progress.start()
        return self._progress

    def _release(self) -> None:
        """Print what was held back while an answer was printed."""
        held, self._held = self._held, []
        for text in held:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._told = time.monotonic()


def clock(seconds: float) -> str:
    """A duration as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
