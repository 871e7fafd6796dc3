"""Recurrent layers: which modules of a model they are, and how a pass runs them over states of many sequences."""

from workers.recurrent.mixers import Mixer, StateShape, describe, find_mixers, keeps_states
from workers.recurrent.states import States

__all__ = ["Mixer", "StateShape", "States", "describe", "find_mixers", "keeps_states"]
