"""Where a link leads to, and the key that opens it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """One engine's end. It travels with a lease's grant, through Ray alone."""

    host: str
    port: int
    epoch: int
    """Of the engine; one that was restarted at the same place has another."""
    key: bytes = field(repr=False)
    """Drawn by the engine as it starts; neither end ever sends it."""
