"""Files that change while this process runs: mounted Secrets, which Kubernetes replaces, and the stop file."""

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
"""Environment variable with the path of a file that a preStop hook creates when the node is about to stop."""
BEGAN_S = time.time()
"""Start of this process. An older stop file is left over from before a container restart."""


class ReloadedFiles(Generic[Content]):
    """The content of files, read again when they change, so that they can be replaced at run time.

    While the files are invalid, the last valid content stays in use: a half-written Secret breaks nothing.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], Content], kept: str, renewed: str = "") -> None:
        """`kept` is logged when the old content stays in use, `renewed` when new content is read. Raises: as `read`."""
        self._paths = paths
        self._read = read
        self._kept = kept
        self._renewed = renewed
        self._version = self._on_disk()
        self._content = read()
        self._last_error = ""

    def now(self) -> Content:
        """The current content, or the last valid one. Each new problem is logged once."""
        version = self._on_disk()
        if version != self._version:
            try:
                self._content, self._version, self._last_error = self._read(), version, ""
                if self._renewed:
                    logger.info(self._renewed)
            except ConfigError as error:
                if str(error) != self._last_error:
                    logger.warning("%s: %s", self._kept, error)
                self._last_error = str(error)
        return self._content

    def _on_disk(self) -> list[tuple[int, ...]]:
        return [_version(path) for path in self._paths]


def _version(path: Path) -> tuple[int, ...]:
    """A value that changes with the file's content or permissions, or if the file is replaced."""
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
