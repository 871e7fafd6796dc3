"""Heads in a target's engine: one with KV of its own, and what they return with verdicts."""

from workers.engine.heads.head_draft import HeadDraft
from workers.engine.heads.returned import read_returned

__all__ = ["HeadDraft", "read_returned"]
