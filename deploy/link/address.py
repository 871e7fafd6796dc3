"""The address of a link, its key, and counts of failures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkTroubles:
    """Failures of one orchestrator's links since its start."""

    num_unopened: int = 0
    """Number of attempts that failed."""
    num_lost: int = 0
    """Number of open links that closed."""

    def __add__(self, other: LinkTroubles) -> LinkTroubles:
        return LinkTroubles(self.num_unopened + other.num_unopened, self.num_lost + other.num_lost)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """One engine's end. It travels with a lease's grant, through Ray alone."""

    host: str
    port: int
    epoch: int
    """Epoch of the engine; one that was restarted in its place has another."""
    key: bytes = field(repr=False)
    """Drawn by the engine as it starts; neither end ever sends it."""
    has_tls: bool = False
    """Whether the engine speaks TLS there, and nothing else."""
