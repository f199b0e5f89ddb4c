"""`metrics.jsonl`: a line of figures at a time, appended whole, readable after any kill."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer_jax.protocol.result_file import writing

METRICS = "metrics.jsonl"
_BLOCK = 1 << 16


class MetricsFile:
    """The open file; a context manager, which closes it. Lines of earlier runs stay in it."""

    def __init__(self, path: Path):
        """Open or make it. What a killed run left of its last line is removed.

        Raises ConfigError when it cannot be written.
        """
        self._folder = path.parent
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, _whole(self._file))

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it outlives the process from here on. Raises ConfigError as opening does."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        written = 0
        with writing(self._folder):
            while written < len(data):
                written += os.write(self._file, data[written:])


def _whole(file: int) -> int:
    """Bytes up to the last line's end."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - _BLOCK)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
