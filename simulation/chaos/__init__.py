"""Chaotic runs by seed: faults, corrupt replies, and the invariants that must hold."""

from simulation.chaos.run import RunReport, run_seed

__all__ = ["RunReport", "run_seed"]
