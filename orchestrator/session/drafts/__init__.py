"""A session's drafts, their draft trees, and the choice of blocks from those trees."""

from orchestrator.session.drafts.drafts import Drafts
