"""Writing a file so that a reader finds the old one, or the whole new one, and never a part."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in `path`'s folder, which becomes `path` when the block ends well.

    The temporary file exists and is empty; the block may write to it or open it as it likes. Then
    it gets mode 0644 and the name `path`, replacing what was there. If the block raises, it is
    removed and `path` stays as it was. The folder must exist; raises OSError as writing does.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
