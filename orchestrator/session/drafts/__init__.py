"""The drafts of a session, the draft trees that they grow, and the blocks that are chosen from them."""

from orchestrator.session.drafts.drafts import Drafts
