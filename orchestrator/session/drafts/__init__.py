"""A session's drafts, their draft trees, and the choice of blocks from those trees."""

from orchestrator.session.drafts.beam_drafts import BeamDrafts, Pace
from orchestrator.session.drafts.drafts import Drafts
