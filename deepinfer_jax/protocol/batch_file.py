"""The input of a batch: a file of request lines, and which of them can be requests.

A line is `{"custom_id", "method": "POST", "url", "body"}`. A line that cannot be a request carries
its error, and never stops the others.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deepinfer_jax.errors import ConfigError, DeepInferError, RequestError
from deepinfer_jax.protocol import chat_completions, completions, fields
from deepinfer_jax.protocol.ask import ApiRequest, Stamp
from deepinfer_jax.request import RequestOutput
from deepinfer_jax.text.tokenizer import Tokenizer
from deepinfer_jax.text.tools import strict_json

MAX_LINE = 64 * 2**20
"""Bytes of the longest line that is read; a longer one gets an error."""

_KEY = 24  # hexadecimal digits of a line's digest that name it
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Endpoint:
    """What answers requests to one url."""

    parse: Callable[[Any, Collection[str]], ApiRequest]
    respond: Callable[[ApiRequest, Sequence[RequestOutput], Tokenizer, Stamp], dict[str, Any]]
    id_prefix: str


_ENDPOINTS = {
    "/v1/chat/completions": Endpoint(chat_completions.parse, chat_completions.respond, "chatcmpl-"),
    "/v1/completions": Endpoint(completions.parse, completions.respond, "cmpl-"),
}
_ENVELOPE = {
    "custom_id": fields.text,
    "method": fields.one_of("POST"),
    "url": fields.one_of(*_ENDPOINTS),
    "body": fields.mapping,
}


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line of the input is and whether it can be a request.

    Attributes:
        number: counted from 1, blank lines included.
        start, size: its bytes in the file.
        key: names the line by its content, wherever it stands in the file.
        custom_id: the client's name of it, if it could be read.
        error: why it cannot be a request, or None.
        is_request: the line itself is well formed, so that `error` is about its body.
    """

    number: int
    start: int
    size: int
    key: str
    custom_id: str | None = None
    error: DeepInferError | None = None
    is_request: bool = False


@dataclass(frozen=True)
class BatchFile:
    """A batch input file, read once from end to end; the requests stay in the file.

    Attributes:
        path: the file.
        lines: its lines without blank ones, in order.
        digest: SHA-256 over the sorted digests of the lines; their order does not change it.
        served: names that `model` may have.
    """

    path: Path
    lines: tuple[Line, ...]
    digest: str
    served: frozenset[str]

    def request(self, file: IO[bytes], line: Line) -> tuple[ApiRequest, Endpoint]:
        """Read a line without an error again. Raises ConfigError when the file has changed."""
        file.seek(line.start)
        data = file.read(line.size).strip()
        if _digest(data)[:_KEY] != line.key[:_KEY]:
            raise ConfigError(
                f"Line {line.number} of {self.path} is not the one that was read before.",
                "The file was changed during the run, so its digest is not the recorded one.",
                "Restore it and run again: what was finished is kept.",
            )
        _, request, endpoint = _parse(line.number, data, self.served)
        return request, endpoint


class _BadLine(Exception):
    """Why a line is no request, with what could be read of it."""

    def __init__(self, error: DeepInferError, custom_id: str | None, is_request: bool):
        super().__init__(str(error))
        self.error, self.custom_id, self.is_request = error, custom_id, is_request


def read_batch(path: Path, served: Collection[str]) -> BatchFile:
    """Read and check a batch file.

    Raises ConfigError when the file cannot be read or has no lines. A bad line is no error here.
    """
    served = frozenset(served)
    lines: list[Line] = []
    digests: list[str] = []
    seen: dict[str, int] = {}
    copies: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            for number, start, size, data, digest in _raw_lines(file):
                copies[digest] += 1
                digests.append(digest)
                key = digest[:_KEY] + (f"-{copies[digest]}" if copies[digest] > 1 else "")
                line = _checked(Line(number, start, size, key), data, served)
                if line.custom_id is not None:
                    first = seen.setdefault(line.custom_id, number)
                    if first != number:
                        line = _repeated(line, first)
                lines.append(line)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.",
            "A batch file is read twice, so it must be a file of this machine.",
            "Name a file of JSON lines.",
        ) from None
    if not lines:
        raise ConfigError(
            f"{path} has no lines.",
            "There is nothing to answer.",
            "Put one request on each line.",
        )
    digest = hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()
    return BatchFile(path, tuple(lines), digest, served)


def _raw_lines(file: IO[bytes]) -> Iterator[tuple[int, int, int, bytes | None, str]]:
    """(number, start, size, content, digest) of every line that is not blank.

    The content is without the white space around it, and None of a line that is too long.
    """
    number, start = 0, len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(start)
    while piece := file.readline(MAX_LINE + 1):
        number += 1
        size = len(piece)
        if size <= MAX_LINE or piece.endswith(b"\n"):
            data = piece.strip()
            if data:
                yield number, start, size, data, _digest(data)
        else:
            digest = hashlib.sha256()
            while True:
                digest.update(piece)
                if piece.endswith(b"\n") or not (piece := file.readline(MAX_LINE)):
                    break
                size += len(piece)
            yield number, start, size, None, digest.hexdigest()
        start += size


def _checked(line: Line, data: bytes | None, served: Collection[str]) -> Line:
    """The line with its custom_id, and its error if it has one."""
    if data is None:
        error = RequestError(
            f"Line {line.number} has {line.size} bytes.",
            f"A line of more than {MAX_LINE} bytes is not read into memory.",
            "Split the request, or shorten it.",
        )
        return dataclasses.replace(line, error=error)
    try:
        custom_id, _, _ = _parse(line.number, data, served)
    except _BadLine as bad:
        return dataclasses.replace(
            line, custom_id=bad.custom_id, error=bad.error, is_request=bad.is_request
        )
    return dataclasses.replace(line, custom_id=custom_id, is_request=True)


def _parse(number: int, data: bytes, served: Collection[str]) -> tuple[str, ApiRequest, Endpoint]:
    """custom_id, request and endpoint of a line. Raises _BadLine."""
    raw: Any = None
    where = f"Line {number}"
    try:
        raw = _json(where, data)
        found = fields.read(where, raw, _ENVELOPE)
        for name in _ENVELOPE:
            fields.require(where, found, name)
        if not found["custom_id"]:
            raise RequestError(
                f"{where} has an empty custom_id.",
                "Results are matched to requests by it.",
                "Give every line a custom_id of its own.",
            )
    except RequestError as error:
        given = raw.get("custom_id") if isinstance(raw, Mapping) else None
        custom_id = given if isinstance(given, str) and given else None
        raise _BadLine(error, custom_id, is_request=False) from None
    endpoint = _ENDPOINTS[found["url"]]
    try:
        request = endpoint.parse(found["body"], served)
        if request.stream:
            raise RequestError(
                "The body sets stream to true.",
                "A batch answers each request with one line.",
                "Leave stream out.",
            )
    except RequestError as error:
        raise _BadLine(error, found["custom_id"], is_request=True) from None
    return found["custom_id"], request, endpoint


def _json(where: str, data: bytes) -> Any:
    try:
        return strict_json(data.decode())
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{where} is no UTF-8 text (byte {error.start}: {error.reason}).",
            "JSON is UTF-8, and no byte of it is replaced.",
            "Write the line as UTF-8.",
        ) from None
    except ValueError as error:
        raise RequestError(
            f"{where} is no JSON: {error}.",
            "Each line is one JSON object.",
            "Correct the line; a line break inside it ends it.",
        ) from None


def _repeated(line: Line, first: int) -> Line:
    error = RequestError(
        f"Line {line.number} has the custom_id {line.custom_id!r} of line {first}.",
        "Results are matched to requests by it, so that a second one could not be told apart.",
        "Give every line a custom_id of its own.",
    )
    return dataclasses.replace(line, error=error, is_request=False)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
