"""Traces of rounds as timelines: files for Perfetto, and pictures."""

from deploy.trace.timeline import Stream

__all__ = ["Stream"]
