"""A real gRPC server around a Servicer, with completions written down by the test: no Ray, no models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2_grpc

from core.config import EngineConfig, Limits, ServiceConfig, WorkerConfig
from core.records import Chunk, FinishReason, GenerationRequest, ModelInfo, Sampling, SpeculationStats, Usage
from deploy.ingress import MonotonicClock
from deploy.servicer import Served, Servicer
from protos.outrider.v1 import generation_pb2_grpc
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level())
INFO = ModelInfo("target", "Llama", "float32", "cpu", 123, TOKENIZER.vocab_size, 200, 1000, (1,))
CONFIG = ServiceConfig(WorkerConfig(EngineConfig("/t")), model_name="pair", limits=Limits(max_message_bytes=100_000))


def ids_of(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Script:
    """Gives the chunks of a script, and remembers what was asked and whether each stream was closed."""

    def __init__(self, *steps: Chunk | BaseException, is_endless: bool = False) -> None:
        self.steps: Sequence[Chunk | BaseException] = steps
        self.is_endless = is_endless
        self.requests: list[GenerationRequest] = []
        self.num_closed = 0
        self.is_waiting = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
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


def greeting() -> list[Chunk]:
    """Two rounds: the target's own "hello", then " wor" as the draft guessed it and the target's own "d"."""
    hello, guessed, own = ids_of("hello"), ids_of(" wor"), ids_of("d")
    stats = SpeculationStats(
        num_rounds=2,
        num_drafted_tokens=6,
        num_accepted_tokens=len(guessed),
        num_draft_rounds=1,
        accepted_per_position=(1,),
    )
    return [
        Chunk("hello", hello, (False,) * len(hello), Usage(3, len(hello))),
        Chunk(
            " word",
            guessed + own,
            (True,) * len(guessed) + (False,) * len(own),
            Usage(3, len(hello + guessed + own)),
            finish_reason=FinishReason.STOP,
            matched_stop="!",
            stats=stats,
        ),
    ]


def served(config: ServiceConfig = CONFIG) -> Served:
    return Served(INFO, None, TOKENIZER, Sampling(temperature=0.7), config)


class _Rpcs(Servicer):
    """Servicer as plain gRPC calls it, which passes a context to every method."""

    async def Watch(self, request, context):  # noqa: N802 - the RPC's name
        async for reply in super().Watch(request):
            yield reply

    async def List(self, request, context):  # noqa: N802 - the RPC's name
        return await super().List(request)


async def _start(completions: Script) -> tuple[grpc.aio.Server, int]:
    grpc_server = grpc.aio.server()
    servicer = _Rpcs(completions, served(), MonotonicClock())
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, grpc_server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, grpc_server)
    port = grpc_server.add_insecure_port("localhost:0")
    await grpc_server.start()
    return grpc_server, port


@contextmanager
def server(completions: Script) -> Iterator[str]:
    """The address of a server that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    grpc_server, port = asyncio.run_coroutine_threadsafe(_start(completions), loop).result(10)
    try:
        yield f"localhost:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(grpc_server.stop(None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
