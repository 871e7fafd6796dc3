"""Who decides how far to guess, what to verify and when to wait."""

from orchestrator.policy.policies import Controls, Pilots, after_calls
from orchestrator.policy.policy import ControlReport, DraftSeen, Found, RoundSeen, Shape
from orchestrator.policy.tree_policy import TreePilot

__all__ = [
    "ControlReport",
    "Controls",
    "DraftSeen",
    "Found",
    "Pilots",
    "RoundSeen",
    "Shape",
    "TreePilot",
    "after_calls",
]
