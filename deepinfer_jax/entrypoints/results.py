"""Outputs as commands show them: as JSON values, as text that grows, and as files of a folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from deepinfer_jax.errors import ConfigError, DeepInferError
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One request as plain JSON values; durations in seconds, log-probs natural."""
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [completion_json(sample) for sample in output.outputs],
        "error": None if output.error is None else error_json(output.error),
        "metrics": dict(output.metrics),
    }


def completion_json(sample: CompletionOutput) -> dict[str, Any]:
    """One sample as plain JSON values."""
    return {
        "index": sample.index,
        "text": sample.text,
        "reasoning": sample.reasoning,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in sample.tool_calls],
        "token_ids": list(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "seq_seed": sample.seq_seed,
        "cumulative_logprob": sample.cumulative_logprob,
        "logprobs": None if sample.logprobs is None else _logprobs_json(sample.logprobs),
    }


def _logprobs_json(found: TokenLogprobs) -> dict[str, Any]:
    return {
        "mode": found.mode,
        "token": found.token.tolist(),
        "top_ids": found.top_ids.tolist(),
        "top": found.top.tolist(),
    }


def error_json(error: DeepInferError) -> dict[str, str]:
    """The kind and the three sentences of a refusal."""
    kind = type(error).__name__
    return {"kind": kind, "what": error.what, "why": error.why, "do": error.do}


def error_text(error: DeepInferError) -> str:
    """A refusal as it is printed: its kind and three sentences on three lines."""
    return f"{type(error).__name__}: {error.what}\n  {error.why}\n  {error.do}"


class Transcript:
    """Prints one sample as it grows: reasoning dim on a terminal, then the answer, then calls."""

    def __init__(self, console: Console):
        self._console = console
        self._reasoning, self._text = 0, 0

    def show(self, sample: CompletionOutput) -> None:
        """Print what is new since the last call."""
        thought = (sample.reasoning or "")[self._reasoning :]
        if thought:
            self._write(thought, style="dim")
            self._reasoning += len(thought)
        said = sample.text[self._text :]
        if said:
            if self._reasoning and not self._text:
                self._write("\n\n")
            self._write(said)
            self._text += len(said)

    def end(self, sample: CompletionOutput) -> None:
        """Print the rest of a finished sample, its tool calls as JSON, and end the line."""
        self.show(sample)
        if self._text or self._reasoning or not sample.tool_calls:
            self._write("\n")
        for call in sample.tool_calls:
            self._write(json.dumps({"name": call.name, "arguments": call.arguments}) + "\n")

    def _write(self, text: str, style: str | None = None) -> None:
        self._console.out(text, style=style, highlight=False, end="")


def console() -> Console:
    """Standard output for text that must arrive unchanged."""
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


class ResultFolder:
    """`results.jsonl`, a line per request as it finishes, beside `run.json`, the manifest.

    Raises ConfigError when the folder already holds results, or cannot be written.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]):
        self._folder = folder
        path = folder / "results.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lines: IO[str] = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(
                f"{folder} already is, or holds, the result of a run.",
                "A second run is never mixed into the lines of the first.",
                "Name another folder with --out, or remove this one.",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror}.",
                "The results go there as they finish.",
                "Name a folder that can be written with --out.",
            ) from None
        write_json(folder / "run.json", manifest)

    def append(self, output: RequestOutput) -> None:
        """Add one finished request."""
        self._lines.write(json.dumps(as_json(output)) + "\n")
        self._lines.flush()

    def close(self) -> None:
        """No more will come."""
        self._lines.close()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole: to a temporary name first, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
