"""Learning rate and window length as functions of the time spent: a run ends on time whatever the machine's speed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A trapezoid over the share of the time spent, and a last phase on long windows."""

    minutes: float
    """Length of the run, wall clock; interruptions between checkpoints do not count."""
    peak_rate: float
    """AdamW learning rate after the warm-up."""
    step_tokens: int = 8192
    """Tokens a step, in either phase."""
    short_tokens: int = 512
    """Window length of the main phase."""
    long_tokens: int = 2048
    """Window length of the last phase: all positions the configuration promises are trained."""
    warmup_share: float = 0.02
    decay_from_share: float = 0.4
    long_from_share: float = 0.88

    def share(self, elapsed_s: float) -> float:
        """How much of the run is over, 0 to 1."""
        return min(1.0, elapsed_s / (60 * self.minutes))

    def learning_rate(self, elapsed_s: float) -> float:
        """Rises linearly, stays, and falls linearly to zero at the end of the time."""
        share = self.share(elapsed_s)
        rising = (share + 1e-4) / self.warmup_share
        falling = (1 - share) / (1 - self.decay_from_share)
        return self.peak_rate * min(1.0, rising, falling)

    def window(self, elapsed_s: float) -> tuple[int, int]:
        """(length, rows) of the next step's windows."""
        length = self.short_tokens if self.share(elapsed_s) < self.long_from_share else self.long_tokens
        return length, max(1, self.step_tokens // length)
