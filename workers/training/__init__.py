"""Training of EAGLE-3 and Medusa heads, and of drafts from texts of token ids, by passes of the target."""

from workers.training.draft import (
    OBJECTIVES,
    DraftAgreement,
    DraftJob,
    DraftPlan,
    DraftSize,
    accepted_by_rule,
    make_draft,
)
from workers.training.head import Acceptance, HeadJob, HeadPlan, make_head
from workers.training.job import TrainingJob, Watcher, check_device, delete_work
from workers.training.texts import TrainingText
from workers.training.trainer import Progress, optimizers_of

__all__ = [
    "OBJECTIVES",
    "Acceptance",
    "DraftAgreement",
    "DraftJob",
    "DraftPlan",
    "DraftSize",
    "HeadJob",
    "HeadPlan",
    "Progress",
    "TrainingJob",
    "TrainingText",
    "Watcher",
    "accepted_by_rule",
    "check_device",
    "delete_work",
    "make_draft",
    "make_head",
    "optimizers_of",
]
