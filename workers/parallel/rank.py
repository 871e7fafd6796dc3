"""A process's place in a group of ranks, and where the group meets."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a group, and the address where the group meets."""

    index: int
    """0 is the engine; the others follow it."""
    size: int
    master_address: str
    """Address of rank 0's machine, as the others reach it."""
    master_port: int
    """A free port of rank 0's machine, on which rank 0 listens."""
    timeout_s: float = 60.0
    """Seconds within which the others must connect at start, and each collective of a step must end."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ConfigError(f"rank {self.index} is not below the number of ranks, {self.size}")
