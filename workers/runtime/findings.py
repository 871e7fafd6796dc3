"""What an engine finds out while it warms up; it holds for another engine in its place, which then is ready sooner.

Free of torch, so that replicas may carry it from one engine to the next.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: drawn as a machine boots, and the same in all its containers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one model with one configuration, on one machine."""

    machine: str
    """Which one: any name that no other machine has."""
    is_compiled: bool
    """Whether steps run by compiled code or recordings."""
    tile_rows: int | None
    """In deterministic mode, how many rows a tile has to have for the bits of a row to be its own; None where that is
    not asked, or no number does."""
    step_times_s: tuple[tuple[int, float], ...]
    """Numbers of rows, and how long a step of so many took."""


def this_machine() -> str:
    """A name that no other machine has; another one each time where there is none to be had."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)
