"""Files that others write while this process runs: mounted Secrets, which Kubernetes replaces, and the stop file."""

from __future__ import annotations

import os
import time
from pathlib import Path

STOP_FILE = "OUTRIDER_STOP_FILE"
"""Environment variable that names a file; a preStop hook creates it when this node is about to stop."""
BEGAN_S = time.time()
"""Start of this process; an older stop file is left from before a restart of the container."""


def version(path: Path) -> tuple[int, ...]:
    """A value that changes with the file's content, its permissions, or its replacement."""
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def is_to_stop() -> bool:
    """Whether the stop file was written since this process began."""
    path = os.environ.get(STOP_FILE)
    try:
        return path is not None and Path(path).stat().st_mtime >= BEGAN_S
    except FileNotFoundError:
        return False
