"""Outputs as commands show and keep them: as JSON values, as files, and as lines of a folder."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from deepinfer_jax.errors import ConfigError
from deepinfer_jax.files import replacing
from deepinfer_jax.request import CompletionOutput, RequestOutput, TokenLogprobs


def json_text(content: Any, indent: int | None = None) -> str:
    """Plain values as JSON that every parser reads: NaN and the infinities become null."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def as_json(output: RequestOutput) -> dict[str, Any]:
    """One request as plain JSON values; durations in seconds, log-probs natural.

    A value that is not finite, such as the log-prob of a token that was ruled out, is None.
    """
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [completion_json(sample) for sample in output.outputs],
        "error": None if output.error is None else output.error.as_json(),
        "metrics": _finite(output.metrics),
    }


def is_truncated(output: RequestOutput) -> bool:
    """Whether tokens of its prompt were cut off to make it fit."""
    return output.metrics.get("truncated_tokens", 0) > 0


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
        "drafted": sample.drafted,
        "accepted": sample.accepted,
        "cumulative_logprob": _finite(sample.cumulative_logprob),
        "logprobs": None if sample.logprobs is None else _logprobs_json(sample.logprobs),
    }


def _logprobs_json(found: TokenLogprobs) -> dict[str, Any]:
    return {
        "mode": found.mode,
        "token": _finite(found.token.tolist()),
        "top_ids": found.top_ids.tolist(),
        "top": _finite(found.top.tolist()),
    }


def console() -> Console:
    """Standard output for text that must arrive unchanged."""
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)


class ResultFolder:
    """`results.jsonl`, a line per request as it finishes, beside `run.json`, the manifest.

    Raises ConfigError when the folder already holds results, or cannot be written.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any]):
        self._folder, self._manifest, self._truncated = folder, manifest, 0
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
        self._lines.write(json_text(as_json(output)) + "\n")
        self._lines.flush()
        self._truncated += is_truncated(output)

    def close(self) -> None:
        """No more will come; prompts that were cut are counted in the manifest."""
        self._lines.close()
        if self._truncated:
            counted = {**self._manifest, "truncated_requests": self._truncated}
            write_json(self._folder / "run.json", counted)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole. Raises ConfigError when it cannot be written."""
    with writing(path) as temporary:
        temporary.write_text(json_text(content, indent=1) + "\n", encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """As `files.replacing`, with a ConfigError for what the disk or the folder refuses."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None


def check_can_write(path: Path) -> None:
    """Refuse a file that could not be written, before what goes into it is computed.

    Raises ConfigError when its folder is missing or read-only, or when it is a folder itself.
    """
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not path.parent.is_dir():
        raise _unwritable(path, f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, f"the folder {path.parent} is read-only")


def _unwritable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {reason}.",
        "The result goes there.",
        "Name a file in a folder that exists and can be written.",
    )
