"""Runs forward passes: eagerly, compiled, or as CUDA graphs."""

from workers.runtime.machine import this_machine
from workers.runtime.memory import NoRoomForKV
from workers.runtime.pacer import Pacer
from workers.runtime.runtime import ModelRuntime

__all__ = ["ModelRuntime", "NoRoomForKV", "Pacer", "this_machine"]
