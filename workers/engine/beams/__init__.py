"""Messages of beam searches in a target engine."""

from workers.engine.beams.scoring import ScoringJob, score

__all__ = ["ScoringJob", "score"]
