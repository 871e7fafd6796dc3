"""Training of EAGLE-3 heads from texts of token ids, by passes of the target."""

from workers.training.acceptance import Acceptance
from workers.training.run import HeadJob, Watcher, make_head
from workers.training.texts import TrainingText
from workers.training.trainer import Progress, TrainingPlan

__all__ = ["Acceptance", "HeadJob", "Progress", "TrainingPlan", "TrainingText", "Watcher", "make_head"]
