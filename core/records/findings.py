"""The results of an engine's warm-up. An engine that replaces it on the same machine reuses them, and is ready sooner.

A replica carries them from one engine to the next: a type of `workers` would have it import torch to read them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
