"""The spans of one request, made from data that the orchestrator has anyway: calls, their times, and engines' timing.

A request's span is a child of its caller's. Below it are the wait in the queue, the wait for a lease, the prefill and
some of the rounds; below those are the calls to engines and the passes that engines report. Engines create no spans:
their replies report how long they waited and computed. The rest of a round trip is attributed to the network, half of
it before the engine's work. Tracing therefore sends no messages to engines. No attribute contains any part of a prompt
or an output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from core.records import Call, CallTrace, Chunk, GenerationRequest
from deploy.calls import CallId
from deploy.metrics import code_of

NS = 1_000_000_000
ENGINES = {Call.VERIFY: "target", Call.BLOCK: "draft", Call.GROWTH: "draft", Call.PREFILL: "draft"}

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    def __init__(self, provider: TracerProvider, every_rounds: int, now: Callable[[], float]) -> None:
        """`now` is the service's clock, in seconds; one round in `every_rounds` has spans, or none if that is 0."""
        self._provider = provider
        self._tracer = provider.get_tracer("outrider")
        self._every_rounds = every_rounds
        self._now = now

    @contextmanager
    def request(self, model: str, call: CallId | None) -> Iterator[RequestSpans | None]:
        """The span of one request, which `call` identifies; yields None if the request is not sampled."""
        parent = TraceContextTextMapPropagator().extract({"traceparent": call.traceparent} if call is not None else {})
        named = {"outrider.request_id": call.request_id} if call is not None else {}
        attributes = {"gen_ai.request.model": model, **named}
        span = self._tracer.start_span("request", parent, kind=SpanKind.SERVER, attributes=attributes)
        try:
            yield RequestSpans(self._tracer, span, self._every_rounds, self._now) if span.is_recording() else None
        except BaseException as error:
            span.set_status(StatusCode.ERROR, code_of(error))
            raise
        finally:
            span.end()


class RequestSpans:
    def __init__(self, tracer: Tracer, span: Span, every_rounds: int, now: Callable[[], float]) -> None:
        self.every_rounds = every_rounds
        self._tracer = tracer
        self._now = now
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._offset_ns = time.time_ns() - int(now() * NS)
        """Nanoseconds from the service's clock to the time of day."""
        self._ended: dict[int, tuple[str, int]] = {}

    def follow(self, index: int, request: GenerationRequest) -> SampleSpans:
        """The spans of sample `index`, which is requested now."""
        if index == 0:
            self._span.set_attribute("gen_ai.usage.input_tokens", len(request.prompt))
        return SampleSpans(self, index, request, self._now())

    def add(
        self,
        name: str,
        inside: Span | None,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Add a span that has ended, below `inside` or else the request's span. Times are on the service's clock."""
        context = self._context if inside is None else set_span_in_context(inside, Context())
        span = self._tracer.start_span(name, context, kind, attributes, start_time=self._ns(start_s))
        span.end(self._ns(max(start_s, end_s)))
        return span

    def end(self, index: int, reason: str, num_tokens: int) -> None:
        """Record the end of sample `index`."""
        self._ended[index] = reason, num_tokens
        ended = [self._ended[each] for each in sorted(self._ended)]
        self._span.set_attribute("gen_ai.response.finish_reasons", [reason for reason, _ in ended])
        self._span.set_attribute("gen_ai.usage.output_tokens", sum(number for _, number in ended))

    def _ns(self, time_s: float) -> int:
        return self._offset_ns + int(time_s * NS)


class SampleSpans:
    """Follows one output, and adds each of its spans when it ends."""

    def __init__(self, spans: RequestSpans, index: int, request: GenerationRequest, asked_s: float) -> None:
        self._spans = spans
        self._index = index
        self._is_asked_for = request.wants_trace
        """Whether the client has requested the trace of calls itself."""
        self._asked_s = asked_s
        self._verdict_s: float | None = None
        """Time of the last verdict, on the clock of all other times of the stream."""
        self._num_rounds = 0
        self._drafted: list[CallTrace] = []
        """Calls to the draft since the last verdict."""

    @property
    def _of(self) -> Attributes:
        return {"outrider.sample": self._index}

    def traced(self, request: GenerationRequest) -> GenerationRequest:
        """The request, changed so that its chunks report calls."""
        return replace(request, wants_trace=True)

    def observe(self, chunk: Chunk) -> Chunk:
        """Add the spans of a chunk; returns the chunk, without its calls unless the client requested them."""
        if chunk.began_s is not None:
            self._observe_calls(chunk.began_s, chunk.trace)
        if chunk.finish_reason is not None:
            self._spans.end(self._index + chunk.output, chunk.finish_reason.value, chunk.usage.completion_tokens)
        return chunk if self._is_asked_for else replace(chunk, trace=())

    def _observe_calls(self, began_s: float, calls: tuple[CallTrace, ...]) -> None:
        if self._verdict_s is None and calls:
            self._begin(began_s, min(call.sent_s for call in calls) + began_s)
        for call in calls:
            moved = replace(call, sent_s=call.sent_s + began_s, received_s=call.received_s + began_s)
            if call.call is Call.VERIFY:
                self._end_round(moved)
            else:
                self._drafted.append(moved)

    def _begin(self, began_s: float, first_s: float) -> None:
        self._spans.add("queue", None, self._asked_s, began_s, self._of)
        self._spans.add("lease", None, began_s, first_s, self._of)

    def _end_round(self, verify: CallTrace) -> None:
        """Add the spans of the round between the last verdict and this one."""
        is_prefill = self._verdict_s is None
        start_s = verify.sent_s if self._verdict_s is None else min(self._verdict_s, verify.sent_s)
        drafted, self._drafted, self._verdict_s = self._drafted, [], verify.received_s
        number, every_rounds = self._num_rounds, self._spans.every_rounds
        self._num_rounds += 1
        if not is_prefill and not (every_rounds and number % every_rounds == 0):
            return
        guessed = {"outrider.guesses": verify.num_guesses, "outrider.accepted": verify.num_used}
        attributes = {**self._of, **({} if is_prefill else {"outrider.round": number, **guessed})}
        name = "prefill" if is_prefill else "round"
        inside = self._spans.add(name, None, start_s, verify.received_s, attributes)
        for call in (verify, *drafted):
            self._add_call(call, inside)

    def _add_call(self, call: CallTrace, inside: Span) -> None:
        """Add a call from its message to its reply, and within it the time that the engine reports."""
        sent = self._spans.add(str(call.call), inside, call.sent_s, call.received_s, {}, SpanKind.CLIENT)
        if (timing := call.timing) is None:
            return
        spent_s = timing.waited_s + timing.computed_s
        way_s = max(0.0, call.received_s - call.sent_s - spent_s)
        end_s = call.received_s - way_s / 2
        attributes = {
            "outrider.waited_s": timing.waited_s,
            "outrider.way_s": way_s,
            "outrider.passes": timing.num_passes,
            "outrider.rows": timing.num_rows,
        }
        start_s = max(call.sent_s, end_s - timing.computed_s)
        self._spans.add(ENGINES[call.call], sent, start_s, end_s, attributes, SpanKind.SERVER)
