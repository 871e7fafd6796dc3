"""Runtimes of heads, in place of a model's: `HeadRuntime` for those that read one state, `EagleRuntime` for EAGLE's."""

from workers.runtime.heads.eagle_runtime import EagleRuntime
from workers.runtime.heads.head_runtime import HeadRuntime, load_head_runtime

__all__ = ["EagleRuntime", "HeadRuntime", "load_head_runtime"]
