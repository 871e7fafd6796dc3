"""Sources of guesses that need no model. Each is one file behind `core.speculation.Guesser`."""

from orchestrator.guessers.breaker import Breaker
from orchestrator.guessers.corpus import NUM_PASSES, CorpusIndex, encode_index, write_index
from orchestrator.guessers.panel import Panel
from orchestrator.guessers.registry import (
    ASKING,
    BY_TEXT,
    CONTROLS,
    GUESSERS,
    HEAD,
    NEED_INDEX,
    SOURCES,
    GuesserInputs,
    Guessers,
    OutputForm,
    available_sources,
    check_sources,
)
from orchestrator.guessers.suffix import Histories, History
