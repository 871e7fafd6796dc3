"""Files that are replaced while they are in use, as Kubernetes does with a mounted Secret."""

from __future__ import annotations

from pathlib import Path


def version(path: Path) -> tuple[int, ...]:
    """A stamp that changes with the file's content, its permissions, or its replacement."""
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
