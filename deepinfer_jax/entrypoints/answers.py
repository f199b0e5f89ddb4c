"""The answers of a stream as commands show and keep them: text as it grows, lines of a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from deepinfer_jax.entrypoints.results import ResultFolder, json_text
from deepinfer_jax.llm import LLM
from deepinfer_jax.request import CompletionOutput, RequestOutput


class Transcript:
    """Prints one sample as it grows: reasoning dim on a terminal, then the answer, then calls."""

    def __init__(self, console: Console):
        self._console = console
        self._thought = self._said = False

    def show(self, part: CompletionOutput) -> None:
        """Print the reasoning and text of a streamed part."""
        if part.reasoning:
            self._write(part.reasoning, style="dim")
            self._thought = True
        if part.text:
            if self._thought and not self._said:
                self._write("\n\n")
            self._write(part.text)
            self._said = True

    def end(self, whole: CompletionOutput) -> None:
        """End the line and print the tool calls of the finished sample as JSON."""
        if self._said or self._thought or not whole.tool_calls:
            self._write("\n")
        for call in whole.tool_calls:
            self._write(json_text({"name": call.name, "arguments": call.arguments}) + "\n")

    def _write(self, text: str, style: str | None = None) -> None:
        self._console.out(text, style=style, highlight=False, end="")


@contextmanager
def keeping(out: Path | None, llm: LLM) -> Iterator[Callable[[RequestOutput], None]]:
    """What adds a finished request to the result folder `out`, or does nothing without one.

    Raises ConfigError as `ResultFolder` does.
    """
    if out is None:
        yield lambda output: None
        return
    folder = ResultFolder(out, llm.manifest())
    try:
        yield folder.append
    finally:
        folder.close()
