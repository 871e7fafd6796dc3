"""Files that are replaced while they are in use, as Kubernetes does with a mounted Secret."""

from __future__ import annotations

from pathlib import Path


def version(path: Path) -> tuple[int, ...]:
    """What changes with the file, or what may be done with it, and when another takes its place."""
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
