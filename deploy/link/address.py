"""Where a link leads to, the key that opens it, and what is counted of links."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkTroubles:
    """What has gone wrong with the links of one orchestrator since its start."""

    num_unopened: int = 0
    """Attempts that failed."""
    num_lost: int = 0
    """Links that closed though they had been open."""

    def __add__(self, other: LinkTroubles) -> LinkTroubles:
        return LinkTroubles(self.num_unopened + other.num_unopened, self.num_lost + other.num_lost)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """One engine's end. It travels with a lease's grant, through Ray alone."""

    host: str
    port: int
    epoch: int
    """Of the engine; one that was restarted at the same place has another."""
    key: bytes = field(repr=False)
    """Drawn by the engine as it starts; neither end ever sends it."""
    has_tls: bool = False
    """Whether the engine speaks TLS there, and nothing else."""
