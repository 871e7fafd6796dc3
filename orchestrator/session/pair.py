"""The models that serve a session, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.config import Limits, SpeculationConfig
from core.records import ModelInfo
from orchestrator.guessers import Guessers


@dataclass(frozen=True, slots=True)
class Pair:
    """What a session must know of the models it is served by."""

    target: ModelInfo
    draft: ModelInfo | None
    speculation: SpeculationConfig
    limits: Limits
    guessers: Guessers = field(default_factory=Guessers)
    extra_drafts: tuple[ModelInfo | None, ...] = ()
    """Drafts beside the first, each None until it has been described."""

    @property
    def drafts(self) -> tuple[ModelInfo | None, ...]:
        """All drafts, by their numbers."""
        return (self.draft, *self.extra_drafts)
