"""How this room puts a whole file in place; appending is the business of `writers`."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, content: bytes) -> Path:
    """Replace `path` by `content` in one move (temporary file beside it, fsync, rename) and return the path.

    A reader sees the old file or the new one, never half of one. Raises OSError as the file system does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path
