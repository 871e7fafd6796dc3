"""The models that serve a session, and their limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.config import Limits, SpeculationConfig
from core.records import ModelInfo
from orchestrator.guessers import Guessers


@dataclass(frozen=True, slots=True)
class Pair:
    """Facts about the models that a session needs."""

    target: ModelInfo
    drafts: tuple[ModelInfo | None, ...]
    """Drafts by number; at least the first. None until the draft has been described, or if there is none."""
    speculation: SpeculationConfig
    limits: Limits
    guessers: Guessers = field(default_factory=Guessers)
