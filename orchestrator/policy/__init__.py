"""Policies: the draft length, the nodes to verify, and when to wait."""

from orchestrator.policy.mode_choice import MeasuredRound
from orchestrator.policy.policies import Controller, Policies
from orchestrator.policy.policy import ControlReport, Found, RoundOutcome, Shape
from orchestrator.policy.tree_policy import TreePolicy

__all__ = ["ControlReport", "Controller", "Found", "MeasuredRound", "Policies", "RoundOutcome", "Shape", "TreePolicy"]
