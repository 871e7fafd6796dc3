"""Measurements of simulated streams, and their summary.

Knows times, chunks and counts; must not know how the streams were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

from core.errors import OutriderError
from core.records import Call, CallTrace, Chunk, SpeculationStats
from orchestrator.policy import ControlReport
from simulation.cluster import Cluster


@dataclass(eq=False, slots=True)
class StreamRecord:
    """One stream, as its client sees it."""

    started_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(arrival time in seconds, number of tokens) of each chunk."""
    calls: list[CallTrace] = field(default_factory=list)
    stats: SpeculationStats | None = None
    error: OutriderError | None = None

    def take(self, chunk: Chunk, now_s: float) -> None:
        self.arrivals.append((now_s, len(chunk.token_ids)))
        self.calls.extend(chunk.trace)
        self.stats = chunk.stats or self.stats

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.arrivals)

    @property
    def num_later_tokens(self) -> int:
        """Number of tokens after the first chunk."""
        return sum(number for _, number in self.arrivals[1:])

    @property
    def decoding_s(self) -> float:
        """Seconds from the first chunk to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def ended_s(self) -> float:
        return self.arrivals[-1][0] if self.arrivals else self.started_s

    def gaps_s(self) -> Iterable[float]:
        """Seconds between consecutive tokens. Tokens of one chunk arrive together."""
        for (before_s, _), (now_s, number) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield now_s - before_s
            yield from [0.0] * (number - 1)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a sample in seconds; all 0 for an empty sample."""

    p50: float
    p95: float
    p99: float
    mean: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p95, p99 = (ordered[ceil(len(ordered) * percent / 100) - 1] for percent in (50, 95, 99))
        return cls(p50, p95, p99, sum(ordered) / len(ordered))


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a scenario."""

    num_streams: int
    num_failed: int
    num_tokens: int
    elapsed_s: float
    tokens_per_s: float
    """Tokens per second of all streams together."""
    tokens_per_s_a_stream: float
    """Tokens per second of one stream while it decodes: tokens after the first chunk over the time since."""
    ttft_s: Percentiles
    """Seconds from the start of a stream to its first token."""
    inter_token_s: Percentiles
    end_to_end_s: Percentiles
    target_utilisation: float
    """Share of the time that a replica is in a pass, on average."""
    draft_utilisation: float
    num_rounds: int
    """Number of rounds after prefill, which is the first round of each stream."""
    tokens_per_round: float
    """Average over rounds after prefill."""
    share_of_hits: float
    """Share of rounds after prefill with a next block prepared in time."""
    acceptance_rate: float
    hit_rate: float
    """Share of verdicts with a prepared next block, among the verdicts for which the draft had grown nodes."""
    time_hidden: float
    """Share of drafting time during which the target verified for the same stream."""
    verify_s: float
    """Mean seconds of a call to the target after prefill, including the wire."""
    pass_s: float
    """Mean seconds from the start of a growing draft's pass to its arrival, including the wire."""
    block_s: float
    """Mean seconds that a round without a prepared block waits for one; 0 if it continues without."""
    control: ControlReport

    @property
    def formula_tokens_per_s(self) -> float:
        """Tokens per second of one stream if a round takes no time except its calls.

        G of docs/control.md, from the measured acceptance, hits and times.
        """
        hit_s, miss_s = max(self.verify_s, self.pass_s), self.verify_s + self.block_s
        round_s = self.share_of_hits * hit_s + (1.0 - self.share_of_hits) * miss_s
        return _ratio(self.tokens_per_round, round_s)


def sum_up(streams: Sequence[StreamRecord], cluster: Cluster, control: ControlReport) -> Report:
    """Summarise all streams of one run."""
    stats = [stream.stats for stream in streams if stream.stats is not None]
    decoding = [stream for stream in streams if len(stream.arrivals) > 1]
    num_tokens = sum(stream.num_tokens for stream in streams)
    elapsed_s = max((s.ended_s for s in streams), default=0.0) - min((s.started_s for s in streams), default=0.0)
    num_hits, num_rounds = sum(s.num_hits for s in stats), sum(s.num_rounds - 1 for s in stats)
    calls = [call for stream in streams for call in stream.calls if call.call is not Call.VERIFY]
    verifying = [call for stream in streams for call in _verifying(stream)[1:]]
    passes, blocks = (_times_s(calls, kind) for kind in (Call.GROWTH, Call.BLOCK))
    return Report(
        num_streams=len(streams),
        num_failed=sum(stream.error is not None for stream in streams),
        num_tokens=num_tokens,
        elapsed_s=elapsed_s,
        tokens_per_s=_ratio(num_tokens, elapsed_s),
        tokens_per_s_a_stream=_ratio(sum(s.num_later_tokens for s in decoding), sum(s.decoding_s for s in decoding)),
        ttft_s=Percentiles.of(stream.arrivals[0][0] - stream.started_s for stream in streams if stream.arrivals),
        inter_token_s=Percentiles.of(gap_s for stream in streams for gap_s in stream.gaps_s()),
        end_to_end_s=Percentiles.of(stream.ended_s - stream.started_s for stream in streams if stream.arrivals),
        target_utilisation=_ratio(cluster.targets.busy_s, elapsed_s * len(cluster.targets.replicas)),
        draft_utilisation=_ratio(cluster.drafts.busy_s, elapsed_s * len(cluster.drafts.replicas)),
        num_rounds=num_rounds,
        tokens_per_round=_ratio(sum(stream.num_later_tokens for stream in decoding), num_rounds),
        share_of_hits=_ratio(num_hits, num_rounds),
        acceptance_rate=_ratio(sum(s.num_accepted_tokens for s in stats), sum(s.num_drafted_tokens for s in stats)),
        hit_rate=_ratio(num_hits, num_hits + sum(s.num_misses for s in stats)),
        time_hidden=_ratio(sum(s.hidden_draft_time_s for s in stats), sum(s.draft_time_s for s in stats)),
        verify_s=_mean([call.received_s - call.sent_s for call in verifying]),
        pass_s=_mean(passes),
        block_s=_ratio(sum(blocks), num_rounds - num_hits),
        control=control,
    )


def _verifying(stream: StreamRecord) -> list[CallTrace]:
    return [call for call in stream.calls if call.call is Call.VERIFY]


def _times_s(calls: Iterable[CallTrace], kind: Call) -> list[float]:
    return [call.received_s - call.sent_s for call in calls if call.call is kind]


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
