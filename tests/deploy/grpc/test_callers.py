"""One caller's calls leave room to those of others, over a socket, with keys and the admission of an orchestrator."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc

from core.config import Limits
from deploy.api import Authenticator, KeyLimits, new_key
from deploy.clock import MonotonicClock
from orchestrator.admission import Admission
from protos.outrider.v1 import generation_pb2 as pb
from protos.outrider.v1 import generation_pb2_grpc
from tests.deploy.grpc.rpc import Script, greeting, server

REQUEST = pb.GenerateRequest(text="say")


class Admitting(Script):
    """Behind the admission of an orchestrator; the first request never ends by itself."""

    def __init__(self, **limits):
        super().__init__(*greeting())
        self.admission = Admission(Limits(**limits), MonotonicClock())

    @asynccontextmanager
    async def admit(self, requests):
        async with self.admission.places(requests):
            yield [self.generate(request) for request in requests]

    async def generate(self, request):
        is_first = not self.requests
        async for chunk in super().generate(request):
            yield chunk
            if is_first:
                await asyncio.Event().wait()


def test_a_caller_that_has_its_share_waits_while_others_are_served(tmp_path):
    (hog, hogs_line), (other, others_line) = new_key("hog", KeyLimits(max_sessions=1)), new_key("other")
    (tmp_path / "keys").write_text(f"{hogs_line}\n{others_line}\n")
    script = Admitting(max_sessions=8, max_queued=8)
    with server(script, Authenticator(tmp_path / "keys")) as address, grpc.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        held = stub.GenerateStream(REQUEST, metadata=[("authorization", f"Bearer {hog}")])
        assert next(held).text == "hello"
        waiting = [
            stub.Generate.future(REQUEST, metadata=[("authorization", f"Bearer {hog}")], timeout=60) for _ in range(3)
        ]
        for _ in range(3):
            reply = stub.Generate(REQUEST, metadata=[("authorization", f"Bearer {other}")], timeout=60)
            assert reply.text == "hello word"
        assert not any(call.done() for call in waiting)
        held.cancel()
        assert [call.result().text for call in waiting] == ["hello word"] * 3
