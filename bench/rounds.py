"""Pipelined rounds against sequential ones: by real processes on this machine."""

from bench.real_rounds import add_arguments, measure

__all__ = ["add_arguments", "measure"]
