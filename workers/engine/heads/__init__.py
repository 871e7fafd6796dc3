"""A head with KV of its own in a target's engine."""

from workers.engine.heads.head_draft import Extended, HeadDraft

__all__ = ["Extended", "HeadDraft"]
