"""A session's drafts: the first, in whose tree all guesses meet, and others that guess beside it."""

from orchestrator.session.drafts.draft_side import DraftSide
from orchestrator.session.drafts.extra_drafts import ExtraDrafts

__all__ = ["DraftSide", "ExtraDrafts"]
