"""Guesses from a corpus that was indexed offline: the index, retrieval, and frequency tables as controls."""

from orchestrator.guessers.corpus.index import NUM_PASSES, CorpusIndex, encode_index, write_index
from orchestrator.guessers.corpus.retrieval import Retrieval
from orchestrator.guessers.corpus.table import CorpusTable
