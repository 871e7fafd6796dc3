"""What speculation did, counted as it happens."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.records import SpeculationStats


@dataclass(slots=True)
class Statistics:
    """Counters of one completion."""

    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    num_draft_failures: int = 0
    num_target_failures: int = 0
    num_stale_replies: int = 0

    def record_round(self, num_guesses: int, num_accepted: int) -> None:
        """Count one verdict; position k counts the rounds in which at least k + 1 guesses were accepted."""
        self.num_rounds += 1
        self.num_draft_rounds += num_guesses > 0
        self.num_drafted_tokens += num_guesses
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(
            num_rounds=self.num_rounds,
            num_draft_rounds=self.num_draft_rounds,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            accepted_per_position=tuple(self.accepted_per_position),
            num_draft_failures=self.num_draft_failures,
            num_target_failures=self.num_target_failures,
        )
