"""The measurements of each request, and the reports of drafting control and of engines.

Knows chunks and reports; must not know Ray (`deploy.metrics.instruments` does). Two values are recorded for each chunk,
everything else once for each request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from core.errors import OutriderError
from core.records import Chunk, FinishReason, SpeculationStats
from deploy.link.address import LinkTroubles
from deploy.metrics import instruments as m
from orchestrator.admission import QueueReport
from orchestrator.policy import ControlReport

if TYPE_CHECKING:
    from core.records import EngineStats

CANCELLED = "CANCELLED"
INTERNAL = "INTERNAL"


class Meters:
    """The measurements of one orchestrator. `now` is its clock, in seconds."""

    def __init__(self, record: m.ServeRecorder, now: Callable[[], float]) -> None:
        self._record = record
        self._now = now
        self._num_changes = 0
        self._link_troubles = LinkTroubles()

    @contextmanager
    def request(self, adapter: str | None = None) -> Iterator[RequestMeter]:
        """Measures one request: enter on its arrival, leave at its end, whatever ends it.

        `adapter`: name of the adapter that it has named as its model.
        """
        meter = RequestMeter(self._record, self._now, adapter)
        try:
            yield meter
        except BaseException as error:
            if not meter.has_finished:
                self._record(m.REQUEST_FAILURE, 1, code_of(error))
            raise

    def observe_control(self, report: ControlReport) -> None:
        """Set the gauges of the present decision and its estimates. Unchanged ones, too: Ray drops old gauges."""
        record = self._record
        record(m.REQUESTS_RUNNING, report.num_sessions)
        record(m.GAMMA, report.draft_tokens)
        record(m.BLOCK_TOKENS, report.block_tokens)
        record(m.DRAFT_RESTING, float(report.draft_tokens == 0))
        record(m.CONTROL_CHANGES, report.num_changes - self._num_changes, without_figures(report.reason))
        self._num_changes = report.num_changes
        record(m.ESTIMATED_HIT_RATE, report.hit_rate)
        record(m.ESTIMATED_WIRE, report.wire_s)
        record(m.ESTIMATED_BRANCH, report.branch_s)
        for position, chance in enumerate(report.acceptance):
            record(m.ESTIMATED_ACCEPTANCE, chance, str(position))
        for metric, times in ((m.ESTIMATED_VERIFY, report.verify_s), (m.ESTIMATED_DRAFT, report.draft_s)):
            for rows, time_s in times.items():
                record(metric, time_s, str(rows))

    def observe_queue(self, report: QueueReport) -> None:
        """Record the number of waiting requests, and the queue time of those that were admitted since the last call."""
        self._record(m.REQUESTS_WAITING, report.num_waiting)
        for waited_s in report.waited_s:
            self._record(m.QUEUE_TIME, waited_s)

    def observe_draft(self, *, is_ready: bool, num_drafted: int) -> None:
        """Show whether the draft of this model is ready, and the number of requests with a lease on it."""
        self._record(m.DRAFT_READY, float(is_ready))
        self._record(m.REQUESTS_DRAFTED, num_drafted)

    def observe_links(self, troubles: LinkTroubles) -> None:
        """Count the failures of links since the last call."""
        before, self._link_troubles = self._link_troubles, troubles
        self._record(m.LINKS_UNOPENED, troubles.num_unopened - before.num_unopened)
        self._record(m.LINKS_LOST, troubles.num_lost - before.num_lost)


class RequestMeter:
    """The measurements of one request; created when the request arrives."""

    def __init__(self, record: m.ServeRecorder, now: Callable[[], float], adapter: str | None = None) -> None:
        self._record = record
        self._now = now
        self._adapter = adapter
        self._arrived_s = now()
        self._first_s: float | None = None
        """Time of the first tokens."""
        self._last_s = self._arrived_s
        self._num_later_tokens = 0
        """Number of tokens after the first chunk."""
        self.has_finished = False

    def observe(self, chunk: Chunk) -> Chunk:
        """Measure a chunk on its way to the client, and return it."""
        if chunk.token_ids:
            self._observe_tokens(chunk, self._now())
        if chunk.finish_reason is not None:
            self._observe_end(chunk, chunk.finish_reason)
        return chunk

    def _observe_tokens(self, chunk: Chunk, now_s: float) -> None:
        num_tokens = len(chunk.token_ids)
        self._record(m.GENERATION_TOKENS, num_tokens)
        if self._first_s is None:
            self._first_s = now_s
            self._record(m.TIME_TO_FIRST_TOKEN, now_s - self._arrived_s)
            self._record(m.PROMPT_TOKENS, chunk.usage.prompt_tokens)
            self._record(m.PROMPT_TOKENS_CACHED, chunk.usage.cached_tokens)
        elif not chunk.output:  # the outputs of a beam search come at once
            self._num_later_tokens += num_tokens
            self._record(m.INTER_TOKEN_LATENCY, now_s - self._last_s)
        self._last_s = now_s

    def _observe_end(self, chunk: Chunk, reason: FinishReason) -> None:
        self.has_finished = True
        self._record(m.REQUEST_SUCCESS, 1, reason.value)
        self._record(m.REQUEST_LATENCY, self._now() - self._arrived_s)
        if self._first_s is not None and self._num_later_tokens:
            self._record(m.TIME_PER_OUTPUT_TOKEN, (self._last_s - self._first_s) / self._num_later_tokens)
        if chunk.stats is not None:
            self._observe_speculation(chunk.stats)

    def _observe_speculation(self, stats: SpeculationStats) -> None:
        for metric, value in (
            (m.TARGET_PASSES, stats.num_rounds),
            (m.NUM_DRAFTS, stats.num_draft_rounds),
            (m.NUM_DRAFT_TOKENS, stats.num_drafted_tokens),
            (m.NUM_ACCEPTED_TOKENS, stats.num_accepted_tokens),
            (m.RELAXED_TOKENS, stats.num_relaxed_tokens),
            (m.CONTINUED_PASSES, stats.num_continued),
            (m.LOOKUP_TOKENS, stats.num_lookup_tokens),
            (m.DRAFT_HITS, stats.num_hits),
            (m.DRAFT_MISSES, stats.num_misses),
            (m.DRAFT_SECONDS, stats.draft_time_s),
            (m.DRAFT_HIDDEN_SECONDS, stats.hidden_draft_time_s),
            (m.DRAFT_FAILURES, stats.num_draft_failures),
            (m.TARGET_FAILURES, stats.num_target_failures),
        ):
            self._record(metric, value)
        if self._adapter is not None:
            self._record(m.ADAPTER_DRAFT_TOKENS, stats.num_drafted_tokens, self._adapter)
            self._record(m.ADAPTER_ACCEPTED_TOKENS, stats.num_accepted_tokens, self._adapter)
        for source in stats.sources:
            self._record(m.SOURCE_TOKENS, source.num_drafted_tokens, source.name)
            self._record(m.SOURCE_ACCEPTED_TOKENS, source.num_accepted_tokens, source.name)
            self._record(m.SOURCE_FAILURES, source.num_failures, source.name)
        for position, num_rounds in enumerate(stats.accepted_per_position):
            self._record(m.ACCEPTED_PER_POSITION, num_rounds, str(position))


def code_of(error: BaseException) -> str:
    """The gRPC code that a client sees when `error` ends its call; CANCELLED if the client ended it."""
    if isinstance(error, OutriderError):
        return error.status
    return INTERNAL if isinstance(error, Exception) else CANCELLED


def without_figures(reason: str) -> str:
    """The reason without its figures, so that the label has few values."""
    return re.sub(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "#", reason)


class EngineMeter:
    """The periodic reports of an engine."""

    def __init__(self, record: m.ServeRecorder) -> None:
        self._record = record
        self._totals: dict[m.Metric, float] = {}

    def observe_death(self) -> None:
        """Count the death of the engine; the next engine counts from 0."""
        self._record(m.ENGINE_DEATHS, 1)
        self.observe_end()

    def observe_end(self) -> None:
        """The next engine counts from 0."""
        self._totals.clear()

    def observe_moved(self, num_sessions: int) -> None:
        """Count the sessions that had to leave a dead engine."""
        self._record(m.SESSIONS_MOVED, num_sessions)

    def observe(self, stats: EngineStats) -> None:
        """Record a report: counters get the increase since the engine's last report."""
        self._record(m.KV_USAGE, stats.kv_use)
        self._record(m.ENGINE_SESSIONS, stats.num_sessions)
        self._record(m.ENGINE_WAITING, stats.num_waiting)
        totals = {
            m.PREEMPTIONS: stats.num_preemptions,
            m.PREFIX_HITS: stats.num_adopted_tokens,
            m.ENGINE_STEPS: stats.num_steps,
            m.EAGER_STEPS: stats.num_eager_steps,
            m.ENGINE_ROWS: stats.num_rows,
            m.ENGINE_BUSY: stats.step_time_s,
            m.LEARNING_TOKENS: stats.num_kept_tokens,
            m.LEARNING_TOKENS_LOST: stats.num_unkept_tokens,
        }
        for metric, total in totals.items():
            self._record(metric, total - self._totals.get(metric, 0.0))
            self._totals[metric] = total
