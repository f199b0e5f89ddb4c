"""What an engine has to say while it works: to a callback, or as warnings where there is none."""

import warnings
from collections.abc import Callable

from deepinfer_jax.engine.programs import Compiled

Reporter = Callable[[str, float, float], None]


class Notices:
    """Passes on what is compiled, and what must not stay unseen.

    Without a callback, a program that is compiled after warm-up and a drafter that goes wrong are
    RuntimeWarnings, and nothing else is said.
    """

    def __init__(self, progress: Reporter | None):
        """`progress` is called with (what, done, total), see `LLM`."""
        self._progress = progress

    def compiled(self, program: Compiled) -> None:
        """A program was compiled."""
        if self._progress is None:
            if program.late is not None:
                warnings.warn(f"compiled {program.name}", RuntimeWarning, stacklevel=2)
            return
        self._progress(f"compiled {program.name}", program.seconds, program.seconds)
        if program.total > 1:
            self._progress("compile", program.done, program.total)

    def alarm(self, text: str) -> None:
        """Something is wrong with the drafter, in a sentence."""
        if self._progress is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        else:
            self._progress(f"alarm: {text}", 0, 0)
