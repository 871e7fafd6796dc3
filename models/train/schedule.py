"""Learning rate and window length as functions of the time spent, so that a run ends on time on any machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """A trapezoid over the share of time spent, with long windows in the last phase."""

    minutes: float
    """Length of the run in wall-clock minutes; time between an interruption and the resumption does not count."""
    peak_rate: float
    """Learning rate after the warm-up."""
    step_tokens: int = 8192
    """Tokens per step, in either phase."""
    short_tokens: int = 512
    """Window length in tokens in the main phase."""
    long_tokens: int = 2048
    """Window length in tokens in the last phase, so that all positions of the model are trained."""
    warmup_share: float = 0.02
    decay_from_share: float = 0.4
    long_from_share: float = 0.88

    def share(self, elapsed_s: float) -> float:
        """Share of the run that is over, in [0, 1]."""
        return min(1.0, elapsed_s / (60 * self.minutes))

    def learning_rate(self, elapsed_s: float) -> float:
        """Rises linearly, stays constant, and falls linearly to zero at the end."""
        share = self.share(elapsed_s)
        rising = (share + 1e-4) / self.warmup_share
        falling = (1 - share) / (1 - self.decay_from_share)
        return self.peak_rate * min(1.0, rising, falling)

    def window(self, elapsed_s: float) -> tuple[int, int]:
        """(length, rows) of the next step's windows."""
        length = self.short_tokens if self.share(elapsed_s) < self.long_from_share else self.long_tokens
        return length, max(1, self.step_tokens // length)
