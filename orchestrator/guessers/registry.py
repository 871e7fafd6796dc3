"""Which guessers there are, by the names that requests and settings call them. A new one is a line here, and its file.

Knows settings; must not know sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from core.config import SpeculationConfig
from core.errors import ConfigError
from core.speculation import DRAFT, Guesser, SourceWorth
from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.ngram import NgramTables
from orchestrator.guessers.panel import Panel
from orchestrator.guessers.prompt_lookup import PromptLookup
from orchestrator.guessers.suffix import SuffixIndex


@dataclass(frozen=True, slots=True)
class Means:
    """What a session's guesser is made with."""

    config: SpeculationConfig
    max_depth: int
    """Guesses in a row that may be of use."""


GUESSERS: Mapping[str, Callable[[Means], Guesser]] = {
    "prompt_lookup": lambda means: PromptLookup(
        means.max_depth,
        min_match=means.config.lookup_min_match,
        max_match=means.config.lookup_max_match,
        by_frequency=means.config.lookup_continuation == "most_frequent",
        num_branches=means.config.lookup_branches,
    ),
    "ngram": lambda means: NgramTables(means.max_depth),
    "suffix": lambda means: SuffixIndex(means.max_depth),
}
"""Each makes one session's guesser."""
SOURCES = (DRAFT, *GUESSERS)
"""All names: the draft engine is one, too."""


class Guessers:
    """The guessers of one orchestrator, and their breakers; a panel of its own for each session."""

    def __init__(self) -> None:
        self._breakers = {source: Breaker(source) for source in GUESSERS}

    def __repr__(self) -> str:
        return f"<Guessers {self._breakers}>"

    @classmethod
    def open(cls, config: SpeculationConfig) -> Guessers:
        """Those that the settings ask for. Raises: ConfigError when one of them cannot be had."""
        check_sources(config.guessers)
        return cls()

    def panel(self, sources: Iterable[str], means: Means, worth: SourceWorth, vocab_size: int) -> Panel:
        """Those of one session."""
        names = [name for name in sources if name != DRAFT and means.max_depth > 0 and self._breakers[name].admits()]
        return Panel({name: GUESSERS[name](means) for name in names}, self._breakers, worth, vocab_size)


def available_sources(config: SpeculationConfig) -> tuple[str, ...]:  # noqa: ARG001  retrieval asks for an index
    """The names that a request may give to a service with these settings."""
    return SOURCES


def check_sources(names: Iterable[str]) -> None:
    """Raises: ConfigError, which names the first that there is none of."""
    for index, name in enumerate(names):
        if name not in SOURCES:
            raise ConfigError(f"speculation.guessers[{index}] must be one of {', '.join(SOURCES)}, got {name!r}")
