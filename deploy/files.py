"""Files that others write while this process runs: mounted Secrets, which Kubernetes replaces, and the stop file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from core.errors import ConfigError

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

STOP_FILE = "OUTRIDER_STOP_FILE"
"""Environment variable that names a file; a preStop hook creates it when this node is about to stop."""
BEGAN_S = time.time()
"""Start of this process; an older stop file is left from before a restart of the container."""


class Reread(Generic[Content]):
    """What files hold, read again when they have changed, so that they can be replaced at run time.

    While they cannot be used, what they held before stays in use: a half-written Secret breaks nothing.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], kept: str, renewed: str = "") -> None:
        """`kept` and `renewed` say in the log what stays in use, or is new. Raises: as `read`."""
        self._paths = paths
        self._read = read
        self._kept = kept
        self._renewed = renewed
        self._version = self._on_disk()
        self._content = read()
        self._complaint = ""

    def now(self) -> Content:
        """What the files hold; or held, where they cannot be used, of which one line in the log tells."""
        version = self._on_disk()
        if version != self._version:
            try:
                self._content, self._version, self._complaint = self._read(), version, ""
                if self._renewed:
                    logger.info(self._renewed)
            except ConfigError as error:
                if str(error) != self._complaint:
                    logger.warning("%s: %s", self._kept, error)
                self._complaint = str(error)
        return self._content

    def _on_disk(self) -> list[tuple[int, ...]]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, ...]:
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
