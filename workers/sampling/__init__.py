"""Sampling and verification of batches of rows on any device, and the draft's candidates."""

from workers.sampling.draft_candidates import DraftRow, Kind, propose
from workers.sampling.sampler import Row, perturbed, process

__all__ = ["DraftRow", "Kind", "Row", "perturbed", "process", "propose"]
