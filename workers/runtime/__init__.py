"""Runs forward passes: eagerly, compiled, or as CUDA graphs."""

from workers.runtime.heads import HeadRuntime, KVHeadRuntime, load_head_runtime, report_layers
from workers.runtime.machine import this_machine
from workers.runtime.memory import NoRoomForKV
from workers.runtime.pacer import Pacer
from workers.runtime.runtime import ModelRuntime, Scores

__all__ = [
    "HeadRuntime",
    "KVHeadRuntime",
    "ModelRuntime",
    "NoRoomForKV",
    "Pacer",
    "Scores",
    "load_head_runtime",
    "report_layers",
    "this_machine",
]
