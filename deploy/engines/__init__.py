"""Engine processes: actors, their incarnations, and a fork server for quick starts."""

from deploy.engines.actors import DraftActor, EngineActor, TargetActor
from deploy.engines.incarnations import Incarnation, cause_of_death

__all__ = ["DraftActor", "EngineActor", "Incarnation", "TargetActor", "cause_of_death"]
