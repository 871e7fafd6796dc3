"""Whether this node is about to stop: a preStop hook leaves a file, which is seen at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

STOP_FILE = "OUTRIDER_STOP_FILE"
"""Environment variable that names a file, which exists from the moment when this node is about to stop."""
BEGAN_S = time.time()
"""An older file is of an earlier life: a restarted container finds the folders of its pod."""


def is_to_stop() -> bool:
    """Whether the file was written since this process began."""
    path = os.environ.get(STOP_FILE)
    try:
        return path is not None and Path(path).stat().st_mtime >= BEGAN_S
    except FileNotFoundError:
        return False
