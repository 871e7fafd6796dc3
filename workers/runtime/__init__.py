"""Runs forward passes: eagerly, compiled, or as CUDA graphs."""

from workers.runtime.heads import EagleRuntime, HeadRuntime, load_head_runtime
from workers.runtime.machine import this_machine
from workers.runtime.memory import NoRoomForKV
from workers.runtime.pacer import Pacer
from workers.runtime.runtime import ModelRuntime, Scores

__all__ = [
    "EagleRuntime",
    "HeadRuntime",
    "ModelRuntime",
    "NoRoomForKV",
    "Pacer",
    "Scores",
    "load_head_runtime",
    "this_machine",
]
