"""Speculation statistics of one completion."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from core.records import Call, CallTrace, SourceStats, SpeculationStats, Timing
from orchestrator.policy import Explanation, Found
from orchestrator.session.verdicts import Judged

Interval = tuple[float, float]
NUM_RECENT = 8
"""Number of recent calls of each kind that are checked for overlap with the other kind."""


def _recent() -> deque[Interval]:
    return deque(maxlen=NUM_RECENT)


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
    """Counters of one completion, and the calls to report with the next chunk."""

    is_traced: bool = True
    """Whether calls are kept for the client's trace."""
    explanation: Explanation | None = None
    """Records the reasons for decisions, if the client asked for them."""
    num_rounds: int = 0
    num_draft_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lookup_tokens: int = 0
    num_relaxed_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    source_failures: Counter[str] = field(default_factory=Counter)
    num_hits: int = 0
    num_misses: int = 0
    num_continued: int = 0
    num_draft_failures: int = 0
    num_target_failures: int = 0
    num_stale_replies: int = 0
    draft_time_s: float = 0.0
    hidden_draft_time_s: float = 0.0
    verify_time_s: float = 0.0
    began_s: float = 0.0
    """Start, in seconds on the orchestrator's clock. Traces count from here."""
    trace: list[CallTrace] = field(default_factory=list)
    _last_pass: CallTrace | None = None
    """The draft's last pass, kept until the number of its guesses in the next block is known."""
    _verified: deque[Interval] = field(default_factory=_recent)
    _drafted: deque[Interval] = field(default_factory=_recent)

    def record_round(self, num_guesses: int, num_accepted: int, num_looked_up: int = 0, num_relaxed: int = 0) -> None:
        """Count one verdict. Position k counts the rounds in which at least k + 1 guesses were accepted."""
        self.num_rounds += 1
        self.num_draft_rounds += num_guesses > 0
        self.num_drafted_tokens += num_guesses
        self.num_accepted_tokens += num_accepted
        self.num_lookup_tokens += num_looked_up
        self.num_relaxed_tokens += num_relaxed
        missing = num_accepted - len(self.accepted_per_position)
        self.accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def record_verdict(self, judged: Judged, num_of_extra_drafts: int) -> None:
        """Count one verdict. `num_of_extra_drafts`: number of nodes that only extra drafts proposed."""
        guess, path = judged.guess, judged.verdict.path
        drafted, accepted = guess.credits(path)
        num_guesses = len(drafted)
        if self.explanation is not None:
            self.explanation.judged(num_guesses, len(path))
        num_looked_up = guess.shape.num_looked_up - (len(guess) - num_guesses) - num_of_extra_drafts
        self.num_continued += judged.is_continued
        self.record_round(num_guesses, len(path), num_looked_up, judged.verdict.num_relaxed)
        self.record_sources(drafted, accepted)
        self.record_verify(judged.sent_s, judged.received_s)
        if self.is_traced:
            times, timing = (judged.sent_s, judged.received_s), judged.verdict.timing
            self.trace.append(CallTrace(Call.VERIFY, *times, num_guesses, len(path), timing, judged.verified))

    def record_sources(self, drafted: Iterable[str], accepted: Iterable[str]) -> None:
        """Credit the source of each node of a block, and of each accepted node."""
        self.drafted_by_source.update(drafted)
        self.accepted_by_source.update(accepted)

    def record_found(self, found: Found) -> None:
        """Count whether the next block was ready when it was needed."""
        self.num_hits += found is Found.HIT
        self.num_misses += found is Found.MISS

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

    def record_pass(self, num_grown: int, timing: Timing, received_s: float) -> None:
        """Count a pass that grew `num_grown` nodes."""
        began_s = received_s - timing.computed_s
        self.record_draft(began_s, received_s)
        if self.is_traced:
            self.trace_pass()
            self._last_pass = CallTrace(Call.GROWTH, began_s, received_s, num_grown, timing=timing)

    def trace_pass(self, num_used: int = 0) -> None:
        """Trace the draft's last pass; `num_used` of its guesses are verified next."""
        last, self._last_pass = self._last_pass, None
        if last is not None:
            self.trace_call(replace(last, num_used=num_used))

    @property
    def draft_wait(self) -> DraftWait:
        waited_s = max(0.0, self.draft_time_s - self.hidden_draft_time_s)
        return DraftWait(waited_s, waited_s + self.verify_time_s)

    def trace_call(self, call: CallTrace) -> None:
        """Add a call to the trace, if there is one."""
        if self.is_traced:
            self.trace.append(call)

    def take_trace(self) -> tuple[CallTrace, ...]:
        """Return the calls since the last time, with times on the stream's own clock."""
        calls, self.trace = self.trace, []
        return tuple(
            replace(call, sent_s=call.sent_s - self.began_s, received_s=call.received_s - self.began_s)
            for call in calls
        )

    def _by_source(self) -> tuple[SourceStats, ...]:
        drafted, accepted, failures = self.drafted_by_source, self.accepted_by_source, self.source_failures
        names = sorted({*drafted, *failures})
        return tuple(SourceStats(name, drafted[name], accepted[name], failures[name]) for name in names)

    def snapshot(self) -> SpeculationStats:
        """Return a snapshot of the counters, in total and by source."""
        counted = {each.name: getattr(self, each.name) for each in fields(SpeculationStats) if each.name != "sources"}
        counted["accepted_per_position"] = tuple(self.accepted_per_position)
        return SpeculationStats(sources=self._by_source(), **counted)


def _overlap(start_s: float, end_s: float, others: Iterable[Interval]) -> float:
    """Return the number of seconds in which both kinds of engine were busy."""
    shared_s = 0.0
    for other_start_s, other_end_s in others:
        if other_end_s > start_s:
            shared_s += max(0.0, min(end_s, other_end_s) - max(start_s, other_start_s))
    return shared_s
