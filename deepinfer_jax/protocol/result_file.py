"""A file of result lines that one process appends to and any kill leaves readable."""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

from deepinfer_jax.errors import ConfigError

_SYNC_S = 1.0  # results of at most so many seconds are lost when the machine loses power
_ID = "batch_req_"
_MEMBERS = {"id", "custom_id", "response", "error", "deepinfer"}


class ResultFile:
    """`results.jsonl`, open and locked.

    A line is written whole, so a killed process loses at most the one it was writing; what there
    is of that line is ignored by `read` and removed by `cut`.
    """

    def __init__(self, path: Path):
        """Open or make the file. Raises ConfigError when it cannot be, or another run has it."""
        self.path = path
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(self._file, path.parent)
        except BaseException:
            os.close(self._file)
            raise
        self._whole = 0  # bytes of the lines that were written whole
        self._synced = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Nothing was ever written."""
        return os.fstat(self._file).st_size == 0

    def read(self) -> Iterator[dict[str, Any]]:
        """The results that were written whole. Raises ConfigError for a damaged file."""
        self._whole, seen = 0, set[str]()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                result = _decoded(line)
                if result is None and self._whole + len(line) == os.fstat(self._file).st_size:
                    return
                if not _is_result(result):
                    raise _damaged(self.path, number, "is no result line")
                if key_of(result) in seen:
                    raise _damaged(self.path, number, "repeats an earlier one")
                seen.add(key_of(result))
                self._whole += len(line)
                yield result

    def cut(self) -> None:
        """Remove what was not written whole; `read` must have come to its end."""
        os.ftruncate(self._file, self._whole)

    def append(self, result: Mapping[str, Any]) -> None:
        """Add a line; it outlives the process from here on."""
        data = json.dumps(result, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        written = 0
        with writing(self.path.parent):
            while written < len(data):
                written += os.write(self._file, data[written:])
            self._whole += len(data)
            if time.monotonic() - self._synced >= _SYNC_S:
                self.sync()

    def sync(self) -> None:
        """Bring the lines to the disk."""
        os.fsync(self._file)
        self._synced = time.monotonic()

    def rewrite(self, keys: Iterable[str]) -> None:
        """Keep the lines of `keys`, as far as there are any, in that order."""
        places, start = {}, 0
        with self.path.open("rb") as lines:
            for line in lines:
                places[key_of(json.loads(line))] = (start, len(line))
                start += len(line)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self.path.open("rb") as old, temporary.open("wb") as new:
            for key in keys:
                if key in places:
                    start, size = places[key]
                    old.seek(start)
                    new.write(old.read(size))
            self._whole = new.tell()
        replaced = os.open(temporary, os.O_RDWR | os.O_APPEND)
        _lock(replaced, self.path.parent)
        os.fsync(replaced)
        os.replace(temporary, self.path)
        os.close(self._file)
        self._file = replaced

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)


def id_of(key: str) -> str:
    """The result's `id` of the input line named `key`."""
    return _ID + key


def key_of(result: Mapping[str, Any]) -> str:
    """The name of the input line that a result answers."""
    return result["id"].removeprefix(_ID)


def replace_json(path: Path, value: Any) -> None:
    """Write a JSON file whole: to a temporary name first, then renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says what to do when `folder` cannot be written, in a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}.",
            "The results go there as they finish; those that it holds are kept.",
            "Free the space or name a folder that can be written, and run again to go on.",
        ) from None


def _decoded(line: bytes) -> Any:
    """The JSON value of a line; None if the line was not written whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


def _is_result(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict) and value.keys() >= _MEMBERS and isinstance(value["id"], str)


def _lock(file: int, folder: Path) -> None:
    """Hold the file for this process alone; the lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ConfigError(
            f"{folder} is being written by another run.",
            "Two runs would answer the same lines twice.",
            "Wait for its end, or name another folder.",
        ) from None


def _damaged(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(
        f"Line {number} of {path} {what}.",
        "Only the last line of a stopped run can be incomplete, so something else changed it.",
        "Remove that line, or name another folder.",
    )
