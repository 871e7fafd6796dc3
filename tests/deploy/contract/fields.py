"""Helpers of the tests of the public contract: the fields of messages, and a pair to ask over a socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from core.ranges import Range, ranges_of
from core.records import GIVEN_SAMPLING, Adapter, Sampling
from outrider_client._proto.generation_pb2_grpc import GenerationServiceStub
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.grpc.test_translate import INFO, RELAXED, served
from tests.vocabularies import as_product, byte_level

TEMPLATE = '{{ messages | tojson }}{{ tools | tojson if tools else "" }}{{ flag | default("") }}'
"""Whatever a chat says is in the prompt."""
DRAFT = replace(INFO, name="draft", layers=(1, 3), digest="sha256:00", arithmetic="here", is_deterministic=True)
ADAPTER = Adapter("pair-adapter", "/adapters/pair", "sha256:01")
PAIR = replace(
    served(as_product(byte_level(), TEMPLATE), config=replace(RELAXED, model_name="pair"), info=replace(DRAFT)),
    target=replace(DRAFT, name="target", num_parameters=5, max_context_tokens=900, adapters=(ADAPTER,)),
    draft=replace(DRAFT, num_parameters=3),
    defaults=Sampling(temperature=0.5, top_k=9, top_p=0.75, min_p=0.25, repetition_penalty=1.5),
)


def inside(allowed: Range) -> float:
    """A number of the range that is nobody's default."""
    return int(allowed.high) // 8 if allowed.is_whole else allowed.low + (allowed.high - allowed.low) * 0.625


SAMPLING: Mapping[str, float] = {name: inside(ranges_of(Sampling)[name]) for name in GIVEN_SAMPLING}
"""A value of each sampling parameter."""


def paths(kind: Descriptor, prefix: str = "") -> Iterator[str]:
    """Names of all fields below `kind` that hold a value, as in refusals, without indices."""
    for field in kind.fields:
        if _is_message(field):
            yield from paths(field.message_type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _is_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def filled(given: Message, prefix: str = "") -> Iterator[str]:
    """Names of the fields that this message gives."""
    for field, value in given.ListFields():
        if not _is_message(field):
            yield prefix + field.name
        else:
            for each in value if field.is_repeated else [value]:
                yield from filled(each, f"{prefix}{field.name}.")


def request_of(fields: Mapping[str, Any]) -> pb.GenerateRequest:
    given = {"requestId": "same", **fields}
    given["sampling"] = {"seed": "7", **given.get("sampling", {})}
    has_prompt = {"text", "tokenIds", "chat"} & set(given)
    return ParseDict(given if has_prompt else {"text": "say", **given}, pb.GenerateRequest())


def told(stub: GenerationServiceStub, method: str, request: Message) -> list[Message]:
    """All messages of the reply."""
    reply = getattr(stub, method)(request, timeout=30)
    return list(reply) if method == "GenerateStream" else [reply]
