"""Who decides how far to guess, what to verify and when to wait."""

from orchestrator.policy.policies import Controls, Pilots
from orchestrator.policy.policy import ControlReport, Found, RoundSeen, Shape
from orchestrator.policy.tree_policy import TreePilot

__all__ = ["ControlReport", "Controls", "Found", "Pilots", "RoundSeen", "Shape", "TreePilot"]
