"""Carries out what sessions decide: leases, batches, timeouts."""

from orchestrator.dispatch.runner import Rounds

__all__ = ["Rounds"]
