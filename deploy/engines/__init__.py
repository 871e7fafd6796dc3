"""The processes of engines: actors, their incarnations, and how they start quickly."""

from deploy.engines.actors import DraftActor, EngineActor, TargetActor
from deploy.engines.incarnations import Incarnation, Kind, cause_of_death

__all__ = ["DraftActor", "EngineActor", "Incarnation", "Kind", "TargetActor", "cause_of_death"]
