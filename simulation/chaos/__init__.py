"""Chaotic runs by seed: faults, corrupt replies, and what must hold all the same."""

from simulation.chaos.run import Story, run_seed

__all__ = ["Story", "run_seed"]
