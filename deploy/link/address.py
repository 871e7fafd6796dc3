"""The address of a link, its key, and counts of failures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkTroubles:
    """Counts of failures of one orchestrator's links since its start."""

    num_unopened: int = 0
    """Attempts that failed."""
    num_lost: int = 0
    """Open links that closed."""

    def __add__(self, other: LinkTroubles) -> LinkTroubles:
        return LinkTroubles(self.num_unopened + other.num_unopened, self.num_lost + other.num_lost)


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """An engine's address for links. It is sent with the grant of a lease, over Ray only."""

    host: str
    port: int
    epoch: int
    """Epoch of the engine; an engine that replaces it has another."""
    key: bytes = field(repr=False)
    """Shared secret, drawn by the engine at start and never sent over the link."""
    has_tls: bool = False
    """Whether the port accepts TLS connections only."""
