"""Requests that no client would send, from a seed: messages and bodies of odd fields, and bytes that were changed.

They go through the real servicers, with completions that the test wrote down. `python -m tests.deploy.grpc.fuzz` runs
as many as it is told to, and says what came of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted, Models
from deploy.api.offload import Offload
from deploy.calls import CallId
from deploy.clock import MonotonicClock
from deploy.grpc.servicer import Servicer
from deploy.http.routes import COMPLETIONS
from deploy.http.servicer import HttpServicer
from deploy.http.wire import Call, Head
from deploy.metrics.meters import Meters
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.grpc.rpc import METHODS, Recorded, Script, greeting, served

ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", 200, 400, 404, 405, 413, 504}
"""Statuses of gRPC or HTTP that a caller's own request may end with."""
INTS = (0, 1, 2, 3, 7, 64, 127, 128, 255, 256, 259, 260, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-320, 1e308, float("inf"), -float("inf"), float("nan"), 2.0, 100.0, 0.001)
TEXTS = (
    "",
    "say",
    "\x00",
    "안녕",
    "👩‍💻e\u0301",
    "\ud7ff\ue000",
    "a" * 300,
    "<|s0|>",
    "pair",
    "adaptive",
    "draft",
    "[",
    "user",
)
STRUCTURES = ('{"type":"integer"}', "{}", "[a-z]+", "(", 'start: "a"', '{"type":', '{"not":{}}', "true")
LIMITS = {"uint32": (0, 2**32 - 1), "int32": (-(2**31), 2**31 - 1), "uint64": (0, 2**64 - 1)}
_KINDS = {
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def odd_message(random: Random, kind: type[Message] = pb.GenerateRequest) -> Message:
    """A message whose fields are each left out, usual, or at an edge of what they can hold."""
    message = kind()
    if isinstance(message, pb.GenerateRequest) and random.random() < 0.7:
        message.text = "say"
        message.stopping.max_tokens = 4
    fields = list(kind.DESCRIPTOR.fields)
    for field in random.sample(fields, random.randint(0, min(4, len(fields)))):
        _fill(message, field, random)
    return message


def _fill(message: Message, field: FieldDescriptor, random: Random) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries = getattr(message, field.name)
        for _ in range(random.choice((1, 2, 600) if random.random() < 0.05 else (1, 2))):
            entries[_value(field.message_type.fields_by_name["key"], random)] = random.choice(FLOATS)
    elif field.is_repeated:
        values = getattr(message, field.name)
        for _ in range(random.choice((0, 1, 2, 3, 20, 200) if random.random() < 0.1 else (1, 2))):
            values.append(_message(field, random) if field.message_type else _value(field, random))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(_message(field, random))
    else:
        setattr(message, field.name, _value(field, random))


def _message(field: FieldDescriptor, random: Random) -> Message:
    return odd_message(random, field.message_type._concrete_class)


def _value(field: FieldDescriptor, random: Random) -> Any:
    if field.type in _KINDS:
        low, high = LIMITS[_KINDS[field.type]]
        value = random.choice(INTS) * random.choice((1, 1, 1, -1))
        return min(high, max(low, value))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return random.randint(-1, 8)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return random.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return random.choice(FLOATS)
    return random.choice(STRUCTURES if field.containing_type.name == "StructuredOutput" else TEXTS)


def mutated(random: Random, data: bytes, other: bytes) -> bytes:
    """`data` with one to four changes: bytes that are flipped, put in, taken out, repeated, cut off or another's."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(changed))
        end = min(len(changed), start + random.randint(1, 8))
        match random.randrange(7):
            case 0 if start < len(changed):
                changed[start] ^= 1 << random.randrange(8)
            case 1:
                changed[start:start] = random.randbytes(random.randint(1, 4))
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = changed[start:end]
            case 4:
                del changed[start:]
            case 5:
                changed[start:end] = b"\xff" * random.randint(1, 10) + b"\x01"
            case 6:
                changed[start:end] = other[: random.randint(0, len(other))]
    return bytes(changed)


def odd_body(random: Random) -> tuple[str, bytes]:
    """A path, and JSON for it: a usual body with fields that are odd by type or value, or broken JSON."""
    path = random.choice(sorted(USUAL))
    body, fields = dict(USUAL[path]), [*COMPLETIONS[path].body.model_fields, "unheard_of"]
    for _ in range(random.randint(0, 4)):
        body[random.choice(fields)] = _json(random)
    data = json.dumps(body).encode()
    return path, mutated(random, data, data) if random.random() < 0.2 else data


USUAL: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "say"},
    "/v1/chat/completions": {"messages": [{"role": "user"}]},
    "/v1/responses": {"input": "say"},
    "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "say"}]},
}
"""The least that each path takes."""
INNER = ("type", "role", "content", "include_usage", "json_schema", "1", "max_draft_tokens", "policy", "name", "text")
"""Names of fields further down."""


def _json(random: Random, depth: int = 0) -> Any:
    leaves = (*INTS, -1, *FLOATS, *TEXTS, *STRUCTURES, None, True, False)
    match random.randrange(8 if depth < 3 else 5):
        case 5:
            return [_json(random, depth + 1) for _ in range(random.randint(0, 3))]
        case 6 | 7:
            names = (
                "type",
                "role",
                "content",
                "include_usage",
                "json_schema",
                "1",
                "max_draft_tokens",
                "policy",
                "name",
            )
            return {random.choice(names): _json(random, depth + 1) for _ in range(random.randint(0, 3))}
        case _:
            return random.choice(leaves)


class Context:
    """Serve's context of a call."""

    code: grpc.StatusCode | None = None

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        assert details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str | bytes]]) -> None:
        assert trailing_metadata

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return ()


class Target:
    """The servicers of both languages, in this process."""

    def __init__(self) -> None:
        clock = MonotonicClock()
        models = Models([Hosted(Script(*greeting()[1:]), served(), Meters(Recorded(), clock.now))])
        self._grpc = Servicer(models, clock, Authenticator(None), Offload())
        self._http = HttpServicer(models, clock, Authenticator(None), Offload())
        self.told: Counter[str | int] = Counter()
        self.faults: list[tuple[str, bytes]] = []

    async def rpc(self, name: str, data: bytes) -> None:
        """Call a method with these bytes; an exception that comes out of it would be UNKNOWN."""
        context = Context()
        try:
            replies = getattr(self._grpc, name)(data, context)
            if isinstance(replies, AsyncIterator):
                [reply async for reply in replies]
            else:
                await replies
            told = "OK" if context.code is None else context.code.name
        except Exception as error:
            logging.exception("%s came out", name)
            told = repr(error)
        self._note(told, name, data)

    async def post(self, path: str, data: bytes) -> None:
        """Call by HTTP."""
        head = None
        try:
            async for part in self._http.respond(Call("POST", path, None, CallId("x"), data)):
                head = part if isinstance(part, Head) else head
            told: str | int = head.status if head is not None else "no reply"
        except Exception as error:
            logging.exception("%s came out", path)
            told = repr(error)
        self._note(told, path, data)

    def _note(self, told: str | int, where: str, data: bytes) -> None:
        self.told[told] += 1
        if told not in ALLOWED:
            self.faults.append((f"{where}: {told}", data))


def odd_calls(random: Random, num: int) -> Iterator[tuple[str, bytes]]:
    """Names of methods, mostly of completions, with odd messages for them."""
    names = [*METHODS, *["Generate"] * 6, *["GenerateStream"] * 3]
    for _ in range(num):
        name = random.choice(names)
        yield name, odd_message(random, METHODS[name]).SerializeToString()


async def fuzz(seed: int, *, num_structured: int = 0, num_mutated: int = 0, num_bodies: int = 0) -> Target:
    """Send this number of calls of each kind to the servicers. The target holds their replies."""
    target, random = Target(), Random(seed)
    for name, data in odd_calls(random, num_structured):
        await target.rpc(name, data)
    seeds = list(odd_calls(random, min(num_mutated, 2000)))
    for _ in range(num_mutated):
        (name, data), (_, other) = random.choice(seeds), random.choice(seeds)
        await target.rpc(name, mutated(random, data, other))
    for _ in range(num_bodies):
        await target.post(*odd_body(random))
    return target


def main() -> int:
    """Run as many as the command line says; the exit status says whether all were answered as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seed", 0), ("structured", 100_000), ("mutated", 1_000_000), ("bodies", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    counts = {f"num_{name}": getattr(options, name) for name in ("structured", "mutated", "bodies")}
    target = asyncio.run(fuzz(options.seed, **counts))
    sys.stdout.write(f"{dict(target.told)}\n")
    for where, data in target.faults[:10]:
        sys.stdout.write(f"{where}: {data!r}\n")
    return bool(target.faults)


if __name__ == "__main__":
    sys.exit(main())
