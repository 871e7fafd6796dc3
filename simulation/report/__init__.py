"""Reports on simulated runs: comparisons, days of load, pictures."""

from simulation.report.comparison import Comparison, Run, compare, plain, run, sequential, sweep
from simulation.report.day import REVERSAL_S, ROLES, TICK_S, Day, Demand, Moment, Scaling, simulate_day
from simulation.report.panels import Line, Panel, picture
from simulation.report.scaling_svg import scaling_picture
from simulation.report.speed_svg import speed_picture
from simulation.report.table import advice_of, comparison_lines, comparison_results

__all__ = [
    "REVERSAL_S",
    "ROLES",
    "TICK_S",
    "Comparison",
    "Day",
    "Demand",
    "Line",
    "Moment",
    "Panel",
    "Run",
    "Scaling",
    "advice_of",
    "compare",
    "comparison_lines",
    "comparison_results",
    "picture",
    "plain",
    "run",
    "scaling_picture",
    "sequential",
    "simulate_day",
    "speed_picture",
    "sweep",
]
