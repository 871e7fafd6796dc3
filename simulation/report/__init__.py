"""Reports on simulated runs: comparisons, days of load, pictures."""

from simulation.report.comparison import Comparison, Run, compare, plain, run, sequential, sweep
from simulation.report.day import REVERSAL_S, ROLES, TICK_S, Day, Demand, Moment, Scaling, simulate_day
from simulation.report.pictures import (
    NUM_SCALING_AXES,
    Axes,
    check_pictures,
    draw_lines,
    draw_scaling,
    draw_speed,
    drawing,
)
from simulation.report.table import advice_of, comparison_lines, comparison_results

__all__ = [
    "NUM_SCALING_AXES",
    "REVERSAL_S",
    "ROLES",
    "TICK_S",
    "Axes",
    "Comparison",
    "Day",
    "Demand",
    "Moment",
    "Run",
    "Scaling",
    "advice_of",
    "check_pictures",
    "compare",
    "comparison_lines",
    "comparison_results",
    "draw_lines",
    "draw_scaling",
    "draw_speed",
    "drawing",
    "plain",
    "run",
    "sequential",
    "simulate_day",
    "sweep",
]
