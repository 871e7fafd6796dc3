"""Recurrent layers: which modules of a model they are, and how a pass runs them over states of many sequences."""

from workers.recurrent.mixers import WEIGHT_IS_READ, Mixer, StateShape, describe, find_mixers, keeps_states, state_bytes
from workers.recurrent.states import States

__all__ = ["WEIGHT_IS_READ", "Mixer", "StateShape", "States", "describe", "find_mixers", "keeps_states", "state_bytes"]
