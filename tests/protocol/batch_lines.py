"""Lines of batch files."""

import json
from pathlib import Path
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = TEXT, **body: Any) -> bytes:
    given = {"prompt": custom_id} if url == TEXT else {}
    body = {"model": "MODEL", **given, **body}
    entry = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(entry).encode()


def write(folder: Path, *lines: bytes, end: bytes = b"\n") -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(end.join(lines) + end)
    return path
