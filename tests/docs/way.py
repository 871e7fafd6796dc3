"""Follows a value through the product: which files are handed it, by a profiler that sees every call.

One request runs in this process, from the bytes of its message to its last chunk: the proxy's handlers, the servicer,
an orchestrator, a link over a real socket, and a target engine on its thread, with a tiny model. Only Serve and Ray are
left out. Files are named as in the repository.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy as np
import ray.exceptions  # noqa: F401  as Serve's proxy has it
from google.protobuf.message import Message

from core.config import EngineConfig, Limits, ServiceConfig, SpeculationConfig, TargetConfig
from core.errors import Unavailable
from core.records import Sampling, Verdict, VerifyRequest
from core.text import TokenLog
from deploy.api import Authenticator, Hosted, Models, Offload, Served
from deploy.clock import MonotonicClock
from deploy.grpc.proxy import one_message, refusing
from deploy.grpc.servicer import Servicer
from deploy.link.client import Link
from deploy.link.server import LinkServer
from deploy.metrics.meters import Meters
from deploy.serve.deployments import LeaseGrant
from deploy.serve.engine_ports import TargetEnginePort
from orchestrator.service import Service
from orchestrator.text.tokenizer import Tokenizer
from protos.outrider.link.v1 import link_pb2
from protos.outrider.v1 import generation_pb2 as pb
from workers.engine import EngineLoop, TargetEngine

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{ROOT / package}/" for package in ("core", "orchestrator", "workers", "deploy"))
PROMPT = tuple(31 + 37 * index % 89 for index in range(60))
"""Each id is one byte in protobuf, and no column of positions or slots looks like them."""
NEEDLE = bytes(PROMPT[3:12])
EPOCH = 5
MAX_DEPTH = 9


class Way:
    """The files in whose functions a value was an argument, or what was returned; `self` is no argument."""

    def __init__(self, carries: Callable[[Any], bool]) -> None:
        self._carries = carries
        self.handed: dict[str, None] = {}
        """In the order in which they come, as a set."""
        self.passed_on: set[str] = set()
        """Of those, by whom it was returned, or handed to a function of another file."""

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGES):
            return
        values = [result] if event == "return" else _arguments(frame, code)
        if not any(map(self._carries, values)):
            return
        here = str(Path(code.co_filename).relative_to(ROOT))
        self.handed[here] = None
        if event == "return":
            self.passed_on.add(here)
        elif (there := _caller(frame)) not in (None, here):
            self.handed[there] = None
            self.passed_on.add(there)


def _arguments(frame: FrameType, code: CodeType) -> list[Any]:
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    rest = code.co_varnames[len(names) : len(names) + bool(code.co_flags & 4) + bool(code.co_flags & 8)]
    return [frame.f_locals[name] for name in (*names, *rest) if name in frame.f_locals and name not in ("self", "cls")]


def _caller(frame: FrameType) -> str | None:
    """The file of ours that called, libraries in between left out; None where an event loop or a thread did."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGES):
        caller = caller.f_back
    return None if caller is None else str(Path(caller.f_code.co_filename).relative_to(ROOT))


def _parts(value: Any) -> list[Any]:
    """What a value is made of, as far as it is a record, a container, or a call that is still to be made."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) < 64 else []
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, functools.partial):
        return [*value.args, *value.keywords.values()]
    return []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _finds(value: Any, is_it: Callable[[Any], bool], seen: set[int], depth: int = 0) -> bool:
    if id(value) in seen or depth > MAX_DEPTH or value is None or isinstance(value, str | int | float | MethodType):
        return False
    seen.add(id(value))
    return is_it(value) or any(_finds(part, is_it, seen, depth + 1) for part in _parts(value))


def carries_prompt(value: Any) -> bool:
    """Whether the prompt's ids are in it, in whatever wrapping before they are a tensor."""
    return _finds(value, _is_prompt, set())


def _is_prompt(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return NEEDLE in value
    if isinstance(value, Message):
        return NEEDLE in value.SerializeToString()
    if isinstance(value, TokenLog):
        return _is_prompt(value.tokens)
    if isinstance(value, list | tuple | np.ndarray) or type(value).__name__ == "RepeatedScalarContainer":
        return len(value) >= len(NEEDLE) and _is_of_ids(value) and NEEDLE in bytes(min(each, 255) for each in value)
    return False


def _is_of_ids(values: Any) -> bool:
    return all(isinstance(each, int | np.integer) and each >= 0 for each in values)


def carries_verdict(value: Any) -> bool:
    """Whether a verdict is in it, in whatever wrapping before it is committed text."""
    return _finds(value, _is_verdict, set())


def _is_verdict(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return any(_is_reply(bytes(value[start:])) for start in (0, 4))  # with the length of its frame, or without
    if isinstance(value, Message):
        return _is_reply(value.SerializeToString())
    return isinstance(value, Verdict)


def _is_reply(data: bytes) -> bool:
    try:
        return any(each.HasField("verdict") for each in link_pb2.Replies.FromString(data).replies)
    except Exception:  # noqa: BLE001  protobuf's own kinds of it
        return False


@contextmanager
def followed(way: Way) -> Any:
    """Meanwhile, `way` sees every call of this thread, and of those that begin."""
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class _Call:
    """What gRPC and Serve know of a call."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def code(self) -> int:
        return 0

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: Any) -> None:
        raise AssertionError(f"the call failed: {code}")


class _Lease:
    """A place on the engine behind `port`."""

    def __init__(self, name: str, port: TargetEnginePort) -> None:
        self.name, self.port, self.engine_id, self.epoch = name, port, "target", EPOCH

    def release(self) -> None:
        """There is nobody to tell."""


class _Leases:
    def __init__(self, port: TargetEnginePort) -> None:
        self._port = port

    async def take_target(self, session: str, tokens: Any = ()) -> _Lease:
        return _Lease(session, self._port)

    async def take_draft(self, session: str, tokens: Any = (), draft: int = 0) -> _Lease:
        raise Unavailable("there is no draft")


class _Actor:
    """A handle whose engine has nothing to be told by actor calls."""

    def __init__(self) -> None:
        self.release = self.verify = self

    async def remote(self, _sessions: Any) -> None:
        return None


async def _message() -> AsyncIterator[bytes]:
    stopping = pb.StoppingParams(max_tokens=40, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), stopping=stopping, logprobs=0)
    yield request.SerializeToString()


async def follow_one(model: Path, way: Way) -> list[Any]:
    """One completion of PROMPT by the checkpoint in `model`; its chunks."""
    config = EngineConfig(str(model), kv_cache_tokens=4096)
    engine = TargetEngine.load(config, EPOCH, lambda _: None)
    loop = EngineLoop(engine)
    server = LinkServer(EPOCH, (VerifyRequest,), loop.post)
    address = await server.start("127.0.0.1", (0, 0))
    link = await Link.open(address)
    port = TargetEnginePort(LeaseGrant("target", EPOCH, _Actor(), "replica"), 60.0, "target")
    port.use(link)
    service = _service(config, engine, _Leases(port))
    try:
        with followed(way):
            loop.start()
            return await _complete(service)
    finally:
        await service.completions.close()
        link.close("the test is over")
        server.close()
        await loop.close()


def _service(engine_config: EngineConfig, engine: TargetEngine, leases: Any) -> Hosted:
    speculation = SpeculationConfig(policy="static", max_draft_tokens=4)
    config = ServiceConfig(TargetConfig(engine_config), model_name="tiny", limits=Limits(), speculation=speculation)
    tokenizer, clock = Tokenizer.from_directory(engine_config.model), MonotonicClock()
    service = Service(config, engine.info, None, tokenizer, leases, clock)
    served = Served(engine.info, None, tokenizer, Sampling(temperature=0), config)
    return Hosted(service, served, Meters(lambda *_: None, clock.now))


async def _complete(hosted: Hosted) -> list[Any]:
    servicer = Servicer(Models([hosted]), MonotonicClock(), Authenticator(None), Offload())
    handler = one_message(refusing(servicer.GenerateStream))
    async with aclosing(handler(_message(), _Call())) as chunks:
        return [chunk async for chunk in chunks]
