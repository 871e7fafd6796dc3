"""The machine that an engine's findings hold for."""

from __future__ import annotations

import secrets
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: drawn when the machine boots, and the same in all its containers."""


def this_machine() -> str:
    """A name that no other machine has; a new one at each call where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)
