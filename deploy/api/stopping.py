"""Whether this node is to stop: a file that whoever stops the node leaves there is seen at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

STOP_FILE = "OUTRIDER_STOP_FILE"
"""The environment may name a file here, which is there from the moment when this node is to stop."""
BEGAN_S = time.time()
"""A file from before that belongs to an earlier life: a container that is started anew finds the folders of its pod."""


def is_to_stop() -> bool:
    """Whether somebody has left the file that says so, since this process began."""
    path = os.environ.get(STOP_FILE)
    try:
        return path is not None and Path(path).stat().st_mtime >= BEGAN_S
    except FileNotFoundError:
        return False
