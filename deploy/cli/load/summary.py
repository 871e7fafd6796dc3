"""Figures of a run: percentiles of latencies, goodput under objectives, rates, acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.cli.load.records import RequestOutcome, RequestRecord

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service-level objectives in seconds; None for none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def are_met(self, record: RequestRecord) -> bool:
        """Whether this request completed within all objectives."""
        pairs = ((self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s), (self.e2e_s, record.e2e_s))
        is_in_time = all(most is None or took is None or took <= most for most, took in pairs)
        return record.outcome is RequestOutcome.COMPLETED and is_in_time


@dataclass(frozen=True, slots=True)
class Latency:
    mean_s: float
    percentiles_s: Mapping[int, float]
    max_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Latency | None:
        """The statistics of values in seconds, with interpolated percentiles; None without values."""
        given = np.fromiter(values, np.float64)
        if not given.size:
            return None
        found = np.percentile(given, PERCENTILES)
        pairs = zip(PERCENTILES, map(float, found), strict=True)
        return cls(float(given.mean()), dict(pairs), float(given.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures. Latencies are those of completed requests, and count from their scheduled times."""

    duration_s: float
    """From the first intended time to the last end."""
    outcomes: Mapping[str, int]
    errors: Mapping[str, int]
    latencies: Mapping[str, Latency]
    """Latencies with values, by name: ttft, itl, tpot, e2e."""
    lateness_s: float
    """p99 of this program's delay in sending; if it is large, the client was the bottleneck."""
    prompt_tokens: int
    output_tokens: int
    """Sum over all requests, including cancelled ones."""
    goodput_per_s: float
    """Requests a second that met all objectives."""
    good_share: float
    """Share of all requests, without cancelled ones, that met all objectives."""
    acceptance: float | None
    """Accepted tokens over drafted tokens; None if nothing was drafted or reported."""
    tokens_per_pass: float | None
    """Output tokens of completed requests, over the target passes that they took part in."""

    @property
    def requests_per_s(self) -> float:
        return self.outcomes.get(RequestOutcome.COMPLETED, 0) / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


def summarize(records: Sequence[RequestRecord], objectives: Objectives) -> Summary:
    """The figures of `records`: requests that have ended, at least one."""
    completed = [record for record in records if record.outcome is RequestOutcome.COMPLETED]
    kept = [record for record in records if record.outcome is not RequestOutcome.CANCELLED]
    duration_s = max(record.ended_s for record in records) - min(record.intended_s for record in records)
    num_good = sum(map(objectives.are_met, records))
    return Summary(
        duration_s=duration_s,
        outcomes=dict(Counter(record.outcome for record in records)),
        errors=dict(Counter(record.error for record in records if record.error)),
        latencies=_latencies(completed),
        lateness_s=float(np.percentile([record.lateness_s for record in records], PERCENTILES[-1])),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        goodput_per_s=num_good / duration_s,
        good_share=num_good / len(kept) if kept else 0.0,
        acceptance=_ratio(_total(completed, "accepted_tokens"), _total(completed, "drafted_tokens")),
        tokens_per_pass=_ratio(
            sum(record.output_tokens for record in completed if record.counts), _total(completed, "target_passes")
        ),
    )


def _latencies(records: Sequence[RequestRecord]) -> Mapping[str, Latency]:
    found = {
        "ttft": Latency.of(record.ttft_s for record in records if record.ttft_s is not None),
        "itl": Latency.of(pause for record in records for pause in record.itl_s),
        "tpot": Latency.of(record.tpot_s for record in records if record.tpot_s is not None),
        "e2e": Latency.of(record.e2e_s for record in records),
    }
    return {name: latency for name, latency in found.items() if latency is not None}


def _total(records: Sequence[RequestRecord], name: str) -> int:
    return sum(getattr(record.counts, name) for record in records if record.counts is not None)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
