"""Carries out what sessions decide: leases, batches, timeouts."""

from orchestrator.dispatch.runner import Runner

__all__ = ["Runner"]
