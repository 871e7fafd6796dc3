"""Sources of guesses that need no model; each is one file behind `core.speculation.Guesser`."""

from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.panel import Panel
from orchestrator.guessers.registry import GUESSERS, SOURCES, Guessers, Means, available_sources, check_sources

__all__ = ["GUESSERS", "SOURCES", "Breaker", "Guessers", "Means", "Panel", "available_sources", "check_sources"]
