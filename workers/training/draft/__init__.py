"""Trains drafts, models of their own, to agree with a target."""

from workers.training.draft.agreement import OBJECTIVES, accepted_by_rule
from workers.training.draft.distillation import DraftAgreement, DraftPlan
from workers.training.draft.run import DraftJob, DraftSize, make_draft

__all__ = [
    "OBJECTIVES",
    "DraftAgreement",
    "DraftJob",
    "DraftPlan",
    "DraftSize",
    "accepted_by_rule",
    "make_draft",
]
