"""Speculation statistics of one completion."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from core.records import SourceStats, SpeculationStats
from orchestrator.session.verdicts import JudgedBlock

Interval = tuple[float, float]
NUM_RECENT = 8
"""Number of recent calls of each kind that are checked for overlap with the other kind."""


@dataclass(frozen=True, slots=True)
class DraftWait:
    """Total time that sessions waited for drafts. Shows whether another replica of the draft would help."""

    waited_s: float = 0.0
    """Seconds of drafting that no verification hid."""
    round_s: float = 0.0
    """Seconds of verification, plus `waited_s`."""

    def __add__(self, other: DraftWait) -> DraftWait:
        return DraftWait(self.waited_s + other.waited_s, self.round_s + other.round_s)

    def __sub__(self, other: DraftWait) -> DraftWait:
        return DraftWait(self.waited_s - other.waited_s, self.round_s - other.round_s)


@dataclass(slots=True)
class Statistics:
    """Counters of one completion."""

    source_failures: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lookup_tokens: int = 0
    num_relaxed_tokens: int = 0
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    num_hits: int = 0
    num_misses: int = 0
    num_continued: int = 0
    num_draft_failures: int = 0
    num_target_failures: int = 0
    num_stale_replies: int = 0
    """Number of replies that answered no open message. For tests; not reported."""
    draft_time_s: float = 0.0
    hidden_draft_time_s: float = 0.0
    verify_time_s: float = 0.0
    _verified: deque[Interval] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    _drafted: deque[Interval] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def record_round(
        self, judged: JudgedBlock, drafted: Sequence[str], accepted: Sequence[str], num_looked_up: int
    ) -> None:
        """Count one verdict. `drafted`, `accepted`: sources of the block's guesses, and of those accepted.

        Position k counts the rounds in which at least k + 1 guesses were accepted.
        """
        self.num_rounds += 1
        self.num_continued += judged.is_continued
        self.num_draft_rounds += len(drafted) > 0
        self.num_drafted_tokens += len(drafted)
        self.num_accepted_tokens += len(accepted)
        self.num_lookup_tokens += num_looked_up
        self.num_relaxed_tokens += judged.verdict.num_relaxed
        self.drafted_by_source.update(drafted)
        self.accepted_by_source.update(accepted)
        self.accepted_per_position.update(range(len(accepted)))

    def record_verify(self, sent_s: float, received_s: float) -> None:
        """Add the time the target spent on this stream. Drafting during that time was hidden."""
        self.verify_time_s += received_s - sent_s
        self.hidden_draft_time_s += _overlap(sent_s, received_s, self._drafted)
        self._verified.append((sent_s, received_s))

    def record_draft(self, sent_s: float, received_s: float) -> None:
        """Add the time the draft was busy. An overlap of two calls is counted when the later one ends."""
        self.draft_time_s += received_s - sent_s
        self.hidden_draft_time_s += _overlap(sent_s, received_s, self._verified)
        self._drafted.append((sent_s, received_s))

    @property
    def draft_wait(self) -> DraftWait:
        waited_s = max(0.0, self.draft_time_s - self.hidden_draft_time_s)
        return DraftWait(waited_s, waited_s + self.verify_time_s)

    def _by_source(self) -> tuple[SourceStats, ...]:
        drafted, accepted, failures = self.drafted_by_source, self.accepted_by_source, self.source_failures
        names = sorted({*drafted, *failures})
        return tuple(SourceStats(name, drafted[name], accepted[name], failures[name]) for name in names)

    def snapshot(self) -> SpeculationStats:
        """Return a snapshot of the counters, in total and by source."""
        counted = {each.name: getattr(self, each.name) for each in fields(SpeculationStats) if each.name != "sources"}
        counted["accepted_per_position"] = tuple(self.accepted_per_position.values())
        return SpeculationStats(sources=self._by_source(), **counted)


def _overlap(start_s: float, end_s: float, intervals: Iterable[Interval]) -> float:
    """Return the number of seconds from `start_s` to `end_s` that lie in `intervals`."""
    shared_s = 0.0
    for other_start_s, other_end_s in intervals:
        if other_end_s > start_s:
            shared_s += max(0.0, min(end_s, other_end_s) - max(start_s, other_start_s))
    return shared_s
