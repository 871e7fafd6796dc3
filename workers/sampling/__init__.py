"""Sampling and verification for batches of rows on any device, and what the draft proposes."""

from workers.sampling.draft_candidates import Kind, Place, propose
from workers.sampling.sampler import Row, perturbed, process

__all__ = ["Kind", "Place", "Row", "perturbed", "process", "propose"]
