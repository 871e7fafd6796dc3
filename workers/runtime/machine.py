"""Identifies the machine that an engine's findings hold for."""

from __future__ import annotations

import secrets
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: a random id, drawn at boot, the same in all containers of the machine."""


def this_machine() -> str:
    """A unique name of this machine; a new name at each call if the system has no boot id."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)
