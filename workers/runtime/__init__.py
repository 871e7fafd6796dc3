"""Runs forward passes: eagerly, compiled, or as CUDA graphs."""

from workers.runtime.head_runtime import HeadRuntime
from workers.runtime.machine import this_machine
from workers.runtime.memory import NoRoomForKV
from workers.runtime.pacer import Pacer
from workers.runtime.runtime import ModelRuntime, Scores

__all__ = ["HeadRuntime", "ModelRuntime", "NoRoomForKV", "Pacer", "Scores", "this_machine"]
