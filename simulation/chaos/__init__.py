"""Chaotic runs by seed: faults, corrupt replies, and the invariants that must hold."""

from simulation.chaos.run import Story, run_seed

__all__ = ["Story", "run_seed"]
