"""A server that answers as a test has written down: any status, any trailers, any nonsense; with TLS or without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from outrider_client._proto import generation_pb2 as pb
from outrider_client._proto import generation_pb2_grpc

Trailers = Sequence[tuple[str, bytes]]


class Refusal(Exception):
    """Ends a call with this status."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailers: Trailers = ()) -> None:
        super().__init__(code)
        self.code, self.details, self.trailers = code, details, trailers


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Each call takes the next answer; the last answer serves all calls that follow."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        """Each a list of messages, Refusals, and functions of the call's context."""
        self.requests: list[Any] = []
        self.contexts: list[grpc.ServicerContext] = []
        self.is_asked = threading.Event()
        self.is_cancelled = threading.Event()

    def GenerateStream(self, request: Any, context: Any) -> Iterator[pb.GenerateChunk]:  # noqa: N802 - the RPC's name
        is_over = threading.Event()
        context.add_callback(lambda: None if is_over.is_set() else self.is_cancelled.set())
        yield from self._answer(request, context)
        if context.is_active():  # else it was cancelled, perhaps before a step could wait for that
            is_over.set()

    def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return next(self._answer(request, context))

    Detokenize = GetModelInfo = ListModels = Tokenize

    def _answer(self, request: Any, context: Any) -> Iterator[Any]:
        self.requests.append(request)
        self.is_asked.set()
        self.contexts.append(context)
        steps = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for step in steps:
            if isinstance(step, Refusal):
                context.set_trailing_metadata(tuple(step.trailers))
                context.abort(step.code, step.details)
            elif isinstance(step, Callable):
                step(context)
            else:
                yield step

    def metadata(self, number: int = -1) -> dict[str, Any]:
        return {entry.key: entry.value for entry in self.contexts[number].invocation_metadata()}


def chunk(*ids: int, total: int, is_last: bool = False) -> pb.GenerateChunk:
    """A piece of an output; its text is its ids."""
    message = pb.GenerateChunk(
        text="".join(map(str, ids)), token_ids=ids, usage=pb.Usage(prompt_tokens=3, completion_tokens=total)
    )
    if is_last:
        message.finish.reason = pb.FINISH_REASON_LENGTH
    return message


@contextmanager
def listening(scripted: Scripted, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> Iterator[str]:
    """The address of a server."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(scripted, server)
    address = f"localhost:{port}"
    bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"localhost:{bound}"
    finally:
        server.stop(None).wait()
