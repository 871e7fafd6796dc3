"""What simulated runs come to: comparisons, days of load, pictures."""

from simulation.report.compare import Comparison, Run, compare, plain, run, sequential, sweep
from simulation.report.day import REVERSAL_S, ROLES, TICK_S, Day, Demand, Scaling, simulate_day
from simulation.report.scaling_svg import Sample, render

__all__ = [
    "REVERSAL_S",
    "ROLES",
    "TICK_S",
    "Comparison",
    "Day",
    "Demand",
    "Run",
    "Sample",
    "Scaling",
    "compare",
    "plain",
    "render",
    "run",
    "sequential",
    "simulate_day",
    "sweep",
]
