"""Trains EAGLE-3 and Medusa heads on the target's hidden states."""

from workers.training.head.acceptance import Acceptance
from workers.training.head.run import HeadJob, make_head
from workers.training.head.teaching import HeadPlan

__all__ = ["Acceptance", "HeadJob", "HeadPlan", "make_head"]
