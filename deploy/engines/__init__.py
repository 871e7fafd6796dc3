"""Engine processes: actors, their incarnations, and a fork server for quick starts."""

from deploy.engines.actors import DraftActor, EngineActor, TargetActor
from deploy.engines.incarnations import Incarnation, cause_of_death
from deploy.engines.placement import REPLICA_CPUS, bundles, placement

__all__ = [
    "REPLICA_CPUS",
    "DraftActor",
    "EngineActor",
    "Incarnation",
    "TargetActor",
    "bundles",
    "cause_of_death",
    "placement",
]
