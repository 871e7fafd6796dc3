"""The spans of a request: one tree below the caller's, with times that fit into each other, and nothing of the text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from core.config import TracingConfig
from core.errors import ConfigError, Overloaded
from core.records import Call, CallTrace, Chunk, FinishReason, Timing, Usage
from deploy.api.hosted import Hosted
from deploy.clock import MonotonicClock
from deploy.metrics.meters import Meters
from deploy.spans import open_tracing
from deploy.spans.tracing import Tracing
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.grpc.rpc import Recorded, Script, encoding, served
from tests.deploy.grpc.test_servicer import Context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
BEGAN_S = 1000.0


def verify(sent_s, received_s, guesses=0, used=0):
    return CallTrace(Call.VERIFY, sent_s, received_s, guesses, used, Timing(0.001, 0.005, 1, 1 + guesses))


def growth(sent_s, received_s):
    return CallTrace(Call.GROWTH, sent_s, received_s, 4, 4, Timing(0.0, received_s - sent_s, 1, 3))


def chunk(*trace, **changes):
    return replace(Chunk("secret", (5,), (False,), Usage(3, 1), trace=trace, began_s=BEGAN_S), **changes)


def rounds(number):
    """A prefill and as many rounds, of 10 ms each, with the draft's pass at the beginning of each."""
    first = chunk(verify(0.002, 0.012))
    starts = [0.012 + 0.01 * index for index in range(number)]
    others = [chunk(growth(start, start + 0.002), verify(start, start + 0.01, 4, 2)) for start in starts]
    return [first, *others[:-1], replace(others[-1], finish_reason=FinishReason.LENGTH, usage=Usage(3, 9))]


class Traced:
    """A servicer whose spans stay in memory."""

    def __init__(self, *steps, sample=1.0, every_rounds=2):
        self.exporter, self.script = InMemorySpanExporter(), Script(*steps)
        provider = TracerProvider(sampler=ParentBasedTraceIdRatio(sample), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        clock = MonotonicClock()
        tracing = Tracing(provider, every_rounds, clock.now)
        self._servicer = encoding([Hosted(self.script, served(), Meters(Recorded(), clock.now), tracing)])

    async def call(self, traceparent=None, **fields):
        context = Context(*([("traceparent", traceparent)] if traceparent else []))
        message = pb.GenerateRequest(text="secret", request_id="r", **fields)
        return [piece async for piece in self._servicer.GenerateStream(message, context)]

    @property
    def spans(self):
        return self.exporter.get_finished_spans()

    def named(self, name):
        return [span for span in self.spans if span.name == name]


async def test_one_request_is_one_tree_below_its_callers_span():
    traced = Traced(*rounds(4))
    await traced.call(SAMPLED)
    (root,) = traced.named("request")
    by_id = {span.context.span_id: span for span in traced.spans}
    assert {span.context.trace_id for span in traced.spans} == {int(TRACE, 16)}
    assert (root.parent.span_id, root.kind) == (int(PARENT, 16), SpanKind.SERVER)
    assert all(span.parent.span_id in by_id for span in traced.spans if span is not root)
    below = {
        span.name: {by_id[each.parent.span_id].name for each in traced.named(span.name)}
        for span in traced.spans
        if span is not root
    }
    assert below == {
        "queue": {"request"},
        "lease": {"request"},
        "prefill": {"request"},
        "round": {"request"},
        "verify": {"prefill", "round"},
        "growth": {"round"},
        "target": {"verify"},
        "draft": {"growth"},
    }


async def test_times_are_those_that_were_measured():
    traced = Traced(*rounds(1), every_rounds=1)
    await traced.call(SAMPLED)
    (lease,), (round_,), (prefill,) = traced.named("lease"), traced.named("round"), traced.named("prefill")
    target = traced.named("target")[0]

    def ms(span):
        return pytest.approx((span.end_time - span.start_time) / 1e6, abs=0.01)

    assert (ms(lease), ms(prefill), ms(round_), ms(target)) == (2, 10, 10, 5)
    assert lease.end_time == pytest.approx(prefill.start_time, abs=1000)
    assert prefill.end_time == pytest.approx(round_.start_time, abs=1000)
    assert prefill.end_time - target.end_time == pytest.approx(2e6, abs=1e4), "half of the way, which is 4 ms"
    assert target.attributes["outrider.way_s"] == pytest.approx(0.004)
    for span in traced.spans:
        parent = next((each for each in traced.spans if each.context.span_id == span.parent.span_id), None)
        if parent is not None and parent.name != "request":
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time


async def test_an_output_that_comes_at_its_end_has_the_same_spans():
    """The output of a beam search comes at its end."""
    parts = rounds(2)
    calls = tuple(call for part in parts for call in part.trace)
    traced = Traced(replace(parts[-1], trace=calls), every_rounds=1)
    await traced.call(SAMPLED)
    names = [span.name for span in traced.spans if span.name in ("queue", "lease", "prefill", "round")]
    assert names == ["queue", "lease", "prefill", "round", "round"]


@pytest.mark.parametrize(("every_rounds", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (0, [])])
async def test_one_round_in_so_many_has_spans(every_rounds, expected):
    traced = Traced(*rounds(5), every_rounds=every_rounds)
    await traced.call(SAMPLED)
    assert [span.attributes["outrider.round"] for span in traced.named("round")] == expected
    assert len(traced.named("prefill")) == 1


async def test_attributes_say_what_was_done_and_nothing_of_the_text():
    traced = Traced(*rounds(2))
    await traced.call(SAMPLED)
    (root,) = traced.named("request")
    assert root.attributes == {
        "gen_ai.request.model": "pair",
        "outrider.request_id": "r",
        "gen_ai.usage.input_tokens": len(traced.script.requests[0].prompt),
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert "secret" not in "".join(span.to_json() for span in traced.spans)


async def test_who_sends_no_trace_begins_one_as_often_as_is_set():
    always, never = Traced(*rounds(1)), Traced(*rounds(1), sample=0.0)
    await always.call()
    await never.call()
    assert always.named("request")[0].parent is None
    assert never.spans == ()
    await never.call(SAMPLED)
    assert len(never.named("request")) == 1, "a caller that samples decides"


async def test_a_caller_that_does_not_sample_is_left_alone():
    traced = Traced(*rounds(1))
    pieces = await traced.call(UNSAMPLED)
    assert traced.spans == ()
    assert not traced.script.requests[0].wants_trace, "nothing is gathered for it"
    assert pieces[-1].finish.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_client_gets_the_calls_that_it_has_asked_for_and_no_others(is_asked):
    traced = Traced(*rounds(2))
    pieces = await traced.call(SAMPLED, speculation=pb.SpeculationParams(trace=is_asked))
    assert traced.script.requests[0].wants_trace
    assert all(bool(piece.trace) is is_asked for piece in pieces)
    assert len(traced.named("round")) == 1


async def test_samples_share_the_requests_span():
    traced = Traced(*rounds(1))
    await traced.call(SAMPLED, n=2, sampling=pb.SamplingParams(seed=1))
    assert sorted(span.attributes["outrider.sample"] for span in traced.named("prefill")) == [0, 1]
    (root,) = traced.named("request")
    assert root.attributes["gen_ai.usage.output_tokens"] == 18


async def test_outputs_of_a_search_are_counted_each():
    last = replace(chunk(), finish_reason=FinishReason.STOP, usage=Usage(3, 4))
    traced = Traced(last, replace(last, output=1, finish_reason=FinishReason.LENGTH, usage=Usage(3, 5)))
    await traced.call(SAMPLED, n=2, beams=pb.BeamParams(beam_width=2))
    (root,) = traced.named("request")
    assert root.attributes["gen_ai.usage.output_tokens"] == 9
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop", "length")


async def test_a_failure_is_told_by_its_code_alone():
    traced = Traced(Overloaded("secret", 1.0))
    await traced.call(SAMPLED)
    (root,) = traced.named("request")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "RESOURCE_EXHAUSTED")
    assert not root.events


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded():
    code = """
import sys
from core.config import TracingConfig
from deploy.spans import open_tracing
assert open_tracing(TracingConfig(), lambda: 0.0) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_packages_are_told_by_the_setting(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(
        ConfigError, match=r"orchestrator\.tracing\.endpoint: needs the packages of outrider\[tracing\]"
    ):
        open_tracing(TracingConfig("http://localhost:1/v1/traces"), lambda: 0.0)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"endpoint": "collector:4318"}, "endpoint"), ({"sample": 1.5}, "sample"), ({"every_rounds": -1}, "every_rounds")],
)
def test_settings_are_checked(settings, field):
    with pytest.raises(ConfigError, match=field):
        TracingConfig(**settings)
