"""Sources of guesses that need no model; each is one file behind `core.speculation.Guesser`."""

from orchestrator.guessers.prompt_lookup import LookupGuesser

__all__ = ["LookupGuesser"]
