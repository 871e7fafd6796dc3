"""The metrics: name, meaning and labels of each, and their export to Prometheus.

Metrics that vLLM has, too, have vLLM's names and meanings. Ray exports each as `ray_outrider_NAME` on every node (port:
`--metrics-export-port`), and adds its origin: application, deployment, replica. `deploy.metrics.meters` records the
values; docs/metrics.md describes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from core.errors import OutriderError, RequestError, ServiceError
from core.records import FinishReason
from orchestrator.guessers import SOURCES

PREFIX = "outrider_"
MODEL_LABEL = "model_name"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name and meaning. All are also labelled by the model."""

    kind: Literal["counter", "gauge", "histogram"]
    """A counter sums the recorded values, a gauge keeps the last one, a histogram counts them by bucket."""
    name: str
    description: str
    label: str | None = None
    label_values: tuple[str, ...] = ()
    """Values of the label that are exported as 0 from the start."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in the unit of its name."""

    def __post_init__(self) -> None:
        """Raises: ValueError if the kind contradicts the name or the buckets, on which Prometheus relies."""
        if (self.kind == "counter") is not self.name.endswith("_total"):
            raise ValueError(f"{self.kind} {self.name!r}: the names of counters end in _total, and no others do")
        if (self.kind == "histogram") is not bool(self.buckets):
            raise ValueError(f"{self.kind} {self.name!r}: histograms have buckets, and no others do")


counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")


def _codes(*kinds: type[OutriderError]) -> Iterator[str]:
    for kind in kinds:
        yield kind.status
        yield from _codes(*kind.__subclasses__())


CODES = tuple(sorted({*_codes(RequestError, ServiceError), OutriderError.status}))
"""Reasons of failed requests."""
REQUEST_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.004, 0.008, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)

# Requests
REQUESTS_RUNNING = gauge("num_requests_running", "Requests that were admitted and have not ended.")
REQUESTS_WAITING = gauge("num_requests_waiting", "Requests that wait in the queue for admission.")
QUEUE_TIME = histogram(
    "request_queue_time_seconds", "Time from a request's arrival to its admission; 0 if it did not have to wait.",
    buckets=FIRST_TOKEN_BUCKETS_S,
)  # fmt: skip
REQUEST_SUCCESS = counter(
    "request_success_total", "Requests that were completed.", label="finished_reason",
    label_values=tuple(FinishReason),
)  # fmt: skip
REQUEST_FAILURE = counter(
    "request_failure_total", "Requests that failed or were cancelled, by gRPC code.", label="code", label_values=CODES
)
PROMPT_TOKENS = counter("prompt_tokens_total", "Prompt tokens of requests.")
PROMPT_TOKENS_CACHED = counter("prompt_tokens_cached_total", "Prompt tokens whose KV was in the target's cache.")
GENERATION_TOKENS = counter("generation_tokens_total", "Tokens sent to clients.")
TIME_TO_FIRST_TOKEN = histogram(
    "time_to_first_token_seconds", "Time from a request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS_S,
)  # fmt: skip
INTER_TOKEN_LATENCY = histogram(
    "inter_token_latency_seconds", "Time between two chunks of a stream; a chunk may hold several tokens.",
    buckets=TOKEN_BUCKETS_S,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = histogram(
    "request_time_per_output_token_seconds", "Mean time between two tokens of a completed request.",
    buckets=TOKEN_BUCKETS_S,
)  # fmt: skip
REQUEST_LATENCY = histogram(
    "e2e_request_latency_seconds", "Time from arrival to the last chunk of a completed request.",
    buckets=REQUEST_BUCKETS_S,
)  # fmt: skip

# Speculation, recorded when a request ends
NUM_DRAFTS = counter("spec_decode_num_drafts_total", "Rounds in which guesses were verified.")
NUM_DRAFT_TOKENS = counter("spec_decode_num_draft_tokens_total", "Guesses that were verified.")
NUM_ACCEPTED_TOKENS = counter("spec_decode_num_accepted_tokens_total", "Guesses that were accepted.")
ADAPTER_DRAFT_TOKENS = counter(
    "adapter_draft_tokens_total", "Guesses that were verified for requests with a LoRA adapter.", label="adapter"
)
ADAPTER_ACCEPTED_TOKENS = counter(
    "adapter_accepted_tokens_total", "Guesses that were accepted for requests with a LoRA adapter.", label="adapter"
)
RELAXED_TOKENS = counter(
    "relaxed_tokens_total", "Accepted guesses that only a relaxed rule accepts.",
)  # fmt: skip
ACCEPTED_PER_POSITION = counter(
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Rounds in which the guess at this position was accepted; positions count from 0.",
    label="position",
)  # fmt: skip
TARGET_PASSES = counter("target_passes_total", "Target passes that committed tokens, counted once for each stream.")
CONTINUED_PASSES = counter(
    "continued_passes_total", "Target passes of blocks with which the target continued by itself."
)
LOOKUP_TOKENS = counter("lookup_tokens_total", "Verified guesses that needed no draft model.")
SOURCE_TOKENS = counter(
    "source_tokens_total", "Verified guesses, by their source.", label="source", label_values=SOURCES
)
SOURCE_ACCEPTED_TOKENS = counter(
    "source_accepted_tokens_total", "Accepted guesses, by their source.", label="source", label_values=SOURCES
)
SOURCE_FAILURES = counter(
    "source_failures_total",
    "Failures of a guesser: it raised an error or gave an invalid guess, and its request continued without it.",
    label="source", label_values=SOURCES,
)  # fmt: skip
DRAFT_HITS = counter("draft_hits_total", "Verdicts for which the next block was ready.")
DRAFT_MISSES = counter(
    "draft_misses_total", "Verdicts for which no next block was ready, although the draft had sent guesses."
)
DRAFT_SECONDS = counter("draft_seconds_total", "Time in which drafts worked for streams.")
DRAFT_HIDDEN_SECONDS = counter(
    "draft_hidden_seconds_total", "Part of `draft_seconds_total` in which the target verified for the same stream."
)
DRAFT_FAILURES = counter(
    "draft_failures_total", "Rounds that continued without the draft's answer, because it was late, lost or invalid."
)
TARGET_FAILURES = counter("target_failures_total", "Times a stream was moved to another target engine.")

# Control: the present decision, and its estimates
GAMMA = gauge("gamma", "Draft length: depth of the blocks that are drafted now.")
BLOCK_TOKENS = gauge("block_tokens", "Number of nodes of a block, in all branches of its tree.")
DRAFT_RESTING = gauge("draft_resting", "1 while nothing is drafted.")
DRAFT_READY = gauge(
    "draft_ready",
    "1 if the model's draft is ready and fits the target, 0 before that; not exported for a model without a draft.",
)
REQUESTS_DRAFTED = gauge("num_requests_drafted", "Requests in progress with a lease on a draft.")
CONTROL_CHANGES = counter(
    "control_changes_total", "Changes of draft length or block size, by reason (figures left out).", label="reason"
)
ESTIMATED_ACCEPTANCE = gauge(
    "estimated_acceptance", "Probability that the guess at this position is accepted, if all guesses before it were.",
    label="position",
)  # fmt: skip
ESTIMATED_HIT_RATE = gauge("estimated_hit_rate", "Probability that the next block is ready when a verdict comes.")
ESTIMATED_VERIFY = gauge("estimated_verify_seconds", "Duration of a target pass, by its number of rows.", label="rows")
ESTIMATED_DRAFT = gauge("estimated_draft_seconds", "Duration of a draft pass, by its number of rows.", label="rows")
ESTIMATED_BRANCH = gauge(
    "estimated_branch_seconds", "Time that each branch of a block adds to a target pass, besides its rows."
)
ESTIMATED_WIRE = gauge("estimated_wire_seconds", "Duration of a round trip to an engine, without the engine's work.")

# Links from this orchestrator to engines
LINKS_UNOPENED = counter(
    "links_unopened_total", "Failed attempts to open a link to an engine; the session then asks another replica."
)
LINKS_LOST = counter("links_lost_total", "Links that closed, so that their sessions had to move to another engine.")

# Engines, by the replicas that own them
KV_USAGE = gauge(
    "kv_cache_usage_perc",
    "Share of an engine's KV blocks that sessions hold, or of its recurrent states if that is larger; 1 is all.",
)
ENGINE_SESSIONS = gauge("engine_sessions", "Sessions that an engine knows, with KV or without.")
ENGINE_WAITING = gauge(
    "engine_sessions_waiting",
    "Sessions whose message waits in an engine: for room in its KV, a prefix that another computes, or a grammar.",
)
PREEMPTIONS = counter("num_preemptions_total", "Sessions whose KV was dropped to make room.")
PREFIX_HITS = counter("prefix_cache_hits_total", "Prompt tokens whose KV another sequence had left in the cache.")
ENGINE_STEPS = counter("engine_steps_total", "Forward passes.")
EAGER_STEPS = counter("engine_eager_steps_total", "Forward passes that ran eagerly although `compile` is set.")
ENGINE_ROWS = counter("engine_rows_total", "Rows of forward passes, of all sessions together.")
ENGINE_BUSY = counter("engine_busy_seconds_total", "Time spent in steps: forward passes and what follows them.")
LEARNING_TOKENS = counter("learning_tokens_total", "Output tokens written to the learning buffer.")
LEARNING_TOKENS_LOST = counter(
    "learning_tokens_lost_total", "Output tokens that the learning buffer could not keep: its disk is full or too slow."
)
ENGINE_DEATHS = counter("engine_deaths_total", "Engines that died or failed, and were replaced.")
SESSIONS_MOVED = counter("sessions_moved_total", "Sessions that had to leave an engine because it died or failed.")

CATALOGUE = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All metrics."""
ORCHESTRATOR_CATALOGUE = CATALOGUE[: CATALOGUE.index(KV_USAGE)]
"""Metrics of orchestrators: requests and control."""
ENGINE_CATALOGUE = CATALOGUE[CATALOGUE.index(KV_USAGE) :]
"""Metrics of engines."""


def zeros(catalogue: Sequence[Metric], num_positions: int = 0) -> Iterator[tuple[Metric, str | None]]:
    """The counters that are exported at 0 from the start, with each known value of their label.

    `num_positions`: the largest number of guesses in a row that a round may have.
    """
    for metric in catalogue:
        if metric.kind != "counter":
            continue
        if metric.label is None:
            yield metric, None
        is_by_position = metric is ACCEPTED_PER_POSITION
        labels = map(str, range(num_positions)) if is_by_position else metric.label_values
        yield from ((metric, label) for label in labels)


class ServeRecorder:
    """Records through Ray Serve, in the process of a replica; about 8 µs a value.

    Counters are exported as 0 from the start: Prometheus does not count the first value of a new counter as an
    increase, and a sum over a missing counter is empty. Ray drops gauges that have not been set for 20 s.
    """

    def __init__(self, model_name: str, catalogue: Sequence[Metric], num_positions: int = 0) -> None:
        self._instruments = {metric.name: _instrument(metric, model_name) for metric in catalogue}
        for metric, label in zeros(catalogue, num_positions):
            self._instruments[metric.name]._record(0.0, _tags(metric, label))  # `inc` refuses 0

    def __call__(self, metric: Metric, value: float, label: str | None = None) -> None:
        """Record a value; `label` is the value of the metric's own label, if it has one."""
        instrument, tags = self._instruments[metric.name], _tags(metric, label)
        match metric.kind:
            case "counter":
                if value > 0:
                    instrument.inc(value, tags)
            case "gauge":
                instrument.set(value, tags)
            case "histogram":
                instrument.observe(value, tags)


def _tags(metric: Metric, label: str | None) -> dict[str, str | None] | None:
    return {metric.label: label} if metric.label is not None else None


def _instrument(metric: Metric, model_name: str) -> Any:
    from ray.serve import metrics  # unit tests need no Ray

    name, labels = PREFIX + metric.name, tuple(filter(None, (MODEL_LABEL, metric.label)))
    instrument: Any
    match metric.kind:
        case "counter":
            instrument = metrics.Counter(name, metric.description, labels)
        case "gauge":
            instrument = metrics.Gauge(name, metric.description, labels)
        case "histogram":
            instrument = metrics.Histogram(name, metric.description, list(metric.buckets), labels)
    instrument.set_default_tags({MODEL_LABEL: model_name})
    return instrument
