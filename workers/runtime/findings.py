"""The results of an engine's warm-up. An engine that replaces it on the same machine reuses them, and is ready sooner.

Imports no torch, so that replicas can carry it from one engine to the next.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Linux: drawn when the machine boots, and the same in all its containers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results for one model with one configuration, on one machine."""

    machine: str
    """A name that no other machine has."""
    is_compiled: bool
    """Whether steps run by a compiled backend: native code or CUDA graphs."""
    tile_rows: int | None
    """In deterministic mode, the number of rows to a tile with which a row's bits do not depend on other rows; None in
    other modes, or where no number does."""
    step_times_s: tuple[tuple[int, float], ...]
    """Pairs of a number of rows and the duration of such a step."""


def this_machine() -> str:
    """A name that no other machine has; a new one at each call where the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(16)
