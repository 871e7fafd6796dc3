"""Guesses from earlier occurrences of the text's suffix: in the text, and in recent outputs of its caller or tenant."""

from orchestrator.guessers.suffix.history import Histories, History
from orchestrator.guessers.suffix.suffix_index import SuffixIndex
