"""A real gRPC server around a Servicer, with completions written down by the test: no Ray, no models."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthListRequest

from core.config import EngineConfig, Limits, ServiceConfig, TargetConfig
from core.records import (
    Call,
    CallTrace,
    Chunk,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    Sampling,
    SourceStats,
    SpeculationStats,
    Timing,
    Usage,
    VerifiedBlock,
)
from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted, Models, Served
from deploy.api.offload import Offload
from deploy.clock import MonotonicClock
from deploy.grpc.proxy import CONNECTION_OPTIONS, one_message, refusing
from deploy.grpc.reading import Reader
from deploy.grpc.servicer import Servicer
from deploy.metrics.instruments import CATALOGUE, Metric
from deploy.metrics.meters import Meters
from orchestrator.policy.policy import ControlReport
from orchestrator.service import Service
from protos.outrider.v1 import generation_pb2
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level())
INFO = ModelInfo("target", "Llama", "float32", "cpu", 123, TOKENIZER.vocab_size, 200, 1000, (1,))
LIMITS = Limits(max_message_bytes=100_000, max_priority=-10)
CONFIG = ServiceConfig(TargetConfig(EngineConfig("/t")), model_name="pair", limits=LIMITS)

REPORT = ControlReport(
    policy="adaptive",
    num_sessions=2,
    draft_tokens=5,
    block_tokens=12,
    reason="draft length 4 -> 5: 61.5 > 60.0 tokens/s",
    acceptance=(0.8, 0.7),
    hit_rate=0.9,
    verify_s={1: 0.01, 8: 0.0125},
    draft_s={1: 0.002},
    wire_s=0.001,
    branch_s=0.0004,
    num_changes=3,
)


def ids_of(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Script:
    """Gives the chunks of a script, and remembers what was asked and whether each stream was closed."""

    def __init__(self, *steps: Chunk | BaseException, is_endless: bool = False) -> None:
        self.steps: Sequence[Chunk | BaseException] = steps
        self.is_endless = is_endless
        self.requests: list[GenerationRequest] = []
        self.num_closed = 0
        self.num_open = 0
        self.is_closed = False
        self.is_waiting = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            for step in self.steps:
                if isinstance(step, BaseException):
                    raise step
                yield step
            if self.is_endless:
                self.is_waiting.set()
                await asyncio.Event().wait()
        finally:
            self.num_closed += 1
            self.num_open -= 1

    @asynccontextmanager
    async def admit(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[list[AsyncGenerator[Chunk, None]], None]:
        yield [self.generate(each) for each in requests]

    def report(self) -> ControlReport:
        return REPORT

    expected_wait_s = full_wait_s = 0.0
    num_waiting = 0

    def wind_down(self) -> int:
        return self.num_open

    async def close(self) -> None:
        self.is_closed = True


class Recorded:
    """Metrics as they would be exported: by name and label, totals of counters, last values, all observations."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str | None], float] = defaultdict(float)
        self.observed: dict[str, list[float]] = defaultdict(list)

    def __call__(self, metric: Metric, value: float, label: str | None = None) -> None:
        assert metric in CATALOGUE
        assert (label is None) == (metric.label is None), f"{metric.name} is labelled by {metric.label}"
        match metric.kind:
            case "counter":
                assert value >= 0
                self.values[metric.name, label] += value
            case "gauge":
                self.values[metric.name, label] = value
            case "histogram":
                self.observed[metric.name].append(value)

    def __getitem__(self, name: str) -> float:
        """The value of a metric without a label."""
        return self.values.get((name, None), 0.0)

    def by_label(self, name: str) -> dict[str | None, float]:
        return {label: value for (other, label), value in self.values.items() if other == name}


def greeting() -> list[Chunk]:
    """Two rounds: the target's own "hello", then " wor" as the draft guessed it and the target's own "d"."""
    hello, guessed, own = ids_of("hello"), ids_of(" wor"), ids_of("d")
    stats = SpeculationStats(
        num_rounds=2,
        num_drafted_tokens=6,
        num_accepted_tokens=len(guessed),
        num_draft_rounds=1,
        accepted_per_position=(1, 1),
        num_hits=3,
        num_misses=1,
        draft_time_s=0.5,
        hidden_draft_time_s=0.4,
        num_lookup_tokens=2,
        num_continued=4,
        sources=(SourceStats("draft", 4, 1), SourceStats("prompt_lookup", 2, 1, 1)),
    )
    block = VerifiedBlock(
        (*guessed, 7, 8),
        (*range(-1, len(guessed) - 1), -1, -1),
        ("draft",) * len(guessed) + ("ngram", "draft"),
        tuple(range(len(guessed))),
        own[0],
    )
    of_prompt = VerifiedBlock((), (), (), (), hello[0])
    prefill = CallTrace(Call.VERIFY, 0.0, 0.010, 0, timing=Timing(0.001, 0.005, 1, 3), verified=of_prompt)
    growth = CallTrace(Call.GROWTH, 0.011, 0.014, 40, 6)
    verify = CallTrace(Call.VERIFY, 0.015, 0.025, 6, len(guessed), Timing(0.0, 0.008, 1, 7), block)
    return [
        Chunk("hello", hello, (False,) * len(hello), Usage(3, len(hello)), trace=(prefill,)),
        Chunk(
            " word",
            guessed + own,
            (True,) * len(guessed) + (False,) * len(own),
            Usage(3, len(hello + guessed + own)),
            finish_reason=FinishReason.STOP,
            matched_stop="!",
            stats=stats,
            trace=(growth, verify),
        ),
    ]


CALLS: Mapping[str, Message] = {
    "Generate": generation_pb2.GenerateRequest(text="say"),
    "GenerateStream": generation_pb2.GenerateRequest(text="say"),
    "ListModels": generation_pb2.ListModelsRequest(),
    "GetModelInfo": generation_pb2.GetModelInfoRequest(),
    "Tokenize": generation_pb2.TokenizeRequest(text="say"),
    "Detokenize": generation_pb2.DetokenizeRequest(token_ids=ids_of("say")),
}
"""A message of each RPC that is answered, for tests of what holds for all RPCs."""
METHODS = {name: type(message) for name, message in CALLS.items()}
HEALTH = {"Check": HealthCheckRequest, "List": HealthListRequest, "Watch": HealthCheckRequest}


class Encoding:
    """A servicer whose RPCs are given messages, which reach it encoded."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._servicer, name)
        if name not in METHODS and name not in HEALTH:
            return method
        return lambda message, context: method(message.SerializeToString(), context)


def encoding(models: Sequence[Hosted], authenticator: Authenticator | None = None) -> Encoding:
    return Encoding(Servicer(Models(models), MonotonicClock(), authenticator or Authenticator(None), Offload()))


def servicer(completions: Script, record: Recorded | None = None) -> Encoding:
    return encoding([Hosted(completions, served(), Meters(record or Recorded(), MonotonicClock().now))])


def served(config: ServiceConfig = CONFIG) -> Served:
    return Served(INFO, None, TOKENIZER, Sampling(temperature=0.7), config)


def _handlers(servicer: Servicer, methods: Mapping[str, Any], reader: Reader) -> dict[str, grpc.RpcMethodHandler]:
    """The handlers of Serve's proxy, without Serve in between."""
    handlers = {}
    for name in methods:
        handler = one_message(refusing(getattr(servicer, name)), reader)
        is_stream = inspect.isasyncgenfunction(handler)
        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        handlers[name] = make(handler, None, lambda message: message.SerializeToString())
    return handlers


async def start(
    completions: Script | Service, authenticator: Authenticator, reader: Reader, pair: Served
) -> tuple[grpc.aio.Server, int]:
    """A server on this loop, and its port."""
    grpc_server = grpc.aio.server(options=CONNECTION_OPTIONS)
    clock = MonotonicClock()
    models = Models([Hosted(completions, pair, Meters(Recorded(), clock.now))])
    rpcs = Servicer(models, clock, authenticator, Offload())
    services = {"outrider.v1.GenerationService": METHODS, "grpc.health.v1.Health": HEALTH}
    for service, methods in services.items():
        handlers = _handlers(rpcs, methods, reader)
        grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = grpc_server.add_insecure_port("localhost:0")
    await grpc_server.start()
    return grpc_server, port


@contextmanager
def server(
    completions: Script,
    authenticator: Authenticator | None = None,
    reader: Reader | None = None,
    pair: Served | None = None,
) -> Iterator[str]:
    """The address of a server that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    grpc_server, port = asyncio.run_coroutine_threadsafe(
        start(completions, authenticator or Authenticator(None), reader or Reader(), pair or served()), loop
    ).result(10)
    try:
        yield f"localhost:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(grpc_server.stop(None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
