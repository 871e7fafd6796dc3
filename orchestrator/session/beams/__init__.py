"""A beam search as a state machine without I/O, and its drafts."""

from orchestrator.session.beams.beam_session import BeamSession

__all__ = ["BeamSession"]
