"""Executes the commands of sessions: leases, batches, timeouts."""

from orchestrator.dispatch.runner import Runner
