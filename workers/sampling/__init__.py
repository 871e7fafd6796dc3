"""Sampling and verification of batches of rows on any device; the draft's candidates."""

from workers.sampling.draft_candidates import DraftRow, Kind, propose
from workers.sampling.draft_vocabulary import DraftVocabulary
from workers.sampling.logits import Row, prepare_adjustment
from workers.sampling.sampler import perturbed, process

__all__ = ["DraftRow", "DraftVocabulary", "Kind", "Row", "perturbed", "prepare_adjustment", "process", "propose"]
