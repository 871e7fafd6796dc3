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
    drafts: tuple[ModelInfo | None, ...]
    """By their numbers, the first at least; each is None until it has been described, or where there is none."""
    speculation: SpeculationConfig
    limits: Limits
    guessers: Guessers = field(default_factory=Guessers)
