"""A beam search as a state machine without I/O, and its drafts."""

from orchestrator.session.beams.beam_session import BeamSession
from orchestrator.session.beams.pace import Pace

__all__ = ["BeamSession", "Pace"]
