"""Engines without models, simulated by laws of agreement (how often a guess is right) and of time."""

from simulation.engines.agreement import steady_law
from simulation.engines.base import SimEngine
from simulation.engines.draft import SimDraft, SimHead
from simulation.engines.features import FEATURE_LAYERS, FEATURE_WIDTH
from simulation.engines.hardware import PRESETS, EngineLaw, Hardware, HopLaw, large_target, small_draft
from simulation.engines.recorded import (
    COLUMNS,
    HEAD_DEPTHS,
    HEAD_TEMPERATURES,
    MAX_GAMMA,
    MAX_RANK,
    RECORDED_TEMPERATURES,
    SHARE_RANKS,
    SHARE_STEP,
    Column,
    HeadLaw,
    TraceLaw,
)
from simulation.engines.target import SimTarget, logprob_of
from simulation.engines.texts import EOS, Agreement, Law, SteadyLaw, Text, mix

__all__ = [
    "COLUMNS",
    "EOS",
    "FEATURE_LAYERS",
    "FEATURE_WIDTH",
    "HEAD_DEPTHS",
    "HEAD_TEMPERATURES",
    "MAX_GAMMA",
    "MAX_RANK",
    "PRESETS",
    "RECORDED_TEMPERATURES",
    "SHARE_RANKS",
    "SHARE_STEP",
    "Agreement",
    "Column",
    "EngineLaw",
    "Hardware",
    "HeadLaw",
    "HopLaw",
    "Law",
    "SimDraft",
    "SimEngine",
    "SimHead",
    "SimTarget",
    "SteadyLaw",
    "Text",
    "TraceLaw",
    "large_target",
    "logprob_of",
    "mix",
    "small_draft",
    "steady_law",
]
