"""Guesses from what ends like the text: in the text itself, and in recent outputs of the same caller or tenant."""

from orchestrator.guessers.suffix.history import Histories, History
from orchestrator.guessers.suffix.suffix_index import SuffixIndex
