"""Converts protobuf to `Given`, which `deploy.api` checks.

Pure functions. Knows the generated messages; must not know gRPC, Serve or sessions (`deploy.grpc.responses` goes the
other way).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from core.errors import InvalidRequest
from core.records import GIVEN_SAMPLING, GenerationRequest, Verification
from deploy import api
from deploy.api import SERVICE_TIERS, Given, GivenTool, Served, check_tools, json_object, require, template_call
from deploy.calls import CallId
from protos.outrider.v1 import generation_pb2 as pb
from workers.grammar import STRUCTURES, Structure

Choice = TypeVar("Choice")
MAX_TOOLS = 128
"""Same limit as for HTTP."""
GIVEN = frozenset(each.name for each in fields(Given))
VERIFICATION_PREFIX = "VERIFICATION_"
VERIFICATIONS = {pb.Verification.Value(VERIFICATION_PREFIX + each.name): each for each in Verification}
TIERS = {pb.ServiceTier.Value(f"SERVICE_TIER_{each.upper()}"): each for each in SERVICE_TIERS}


def to_requests(
    message: pb.GenerateRequest, served: Served, now: float, call: CallId | None = None
) -> list[GenerationRequest]:
    """One request for each of the `n` samples; `now` is the service's clock, for the deadline.

    Raises: InvalidRequest.
    """
    return api.to_requests(given_by(message, call), served, now)


def given_by(message: pb.GenerateRequest, call: CallId | None = None) -> Given:
    """The message's fields. The caller comes from the call, and so does the request id if the message has none.

    Raises: InvalidRequest for an unknown verification or service tier.
    """
    set_fields = {
        field.name: value
        for group in (message, message.sampling, message.stopping, message.speculation)
        for field, value in group.ListFields()
    }
    prompt = message.WhichOneof("prompt")
    return Given(
        **{
            **{name: value for name, value in set_fields.items() if name in GIVEN},
            **(_chat(message.chat) if prompt == "chat" else {}),
            "token_ids": message.token_ids.ids if prompt == "token_ids" else None,
            "source_token_ids": message.source_token_ids.ids if message.HasField("source_token_ids") else None,
            "request_id": message.request_id or (call.request_id if call is not None else ""),
            "caller": call.caller if call is not None else "",
            "service_tier": _chosen(message.service_tier, TIERS, pb.ServiceTier.Name, "service_tier"),
            "sampling": {name: set_fields[name] for name in GIVEN_SAMPLING if name in set_fields},
            "bad_word_ids": [word.ids for word in message.sampling.bad_word_ids],
            "verification": _chosen(
                message.speculation.verification, VERIFICATIONS, pb.Verification.Name, "speculation.verification"
            ),
            "resume_samples": [output.ids for output in message.resume_samples],
            "structure": _structure(message.structured_output) if message.HasField("structured_output") else None,
        }
    )


def _structure(message: pb.StructuredOutput) -> Structure:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("structured_output", f"one of {', '.join(STRUCTURES)} must be given")
    return Structure(kind, message.choice.choices if kind == "choice" else getattr(message, kind))


def _chat(message: pb.ChatMessages) -> dict[str, Any]:
    field, most = "chat.tools", MAX_TOOLS
    require(len(message.tools) <= most, field, f"at most {most}", len(message.tools))
    tools = [_tool(tool, f"{field}[{index}]") for index, tool in enumerate(message.tools)]
    check_tools(tools)
    return {
        "chat": [_chat_message(each, f"chat.messages[{index}]") for index, each in enumerate(message.messages)],
        "tools": [tool.for_template for tool in tools],
        "template_arguments": json_object(message.template_arguments, "chat.template_arguments"),
    }


def _tool(tool: pb.Tool, field: str) -> GivenTool:
    return GivenTool(field, tool.name, tool.description, json_object(tool.parameters, f"{field}.parameters"))


def _chat_message(message: pb.ChatMessage, field: str) -> dict[str, Any]:
    """The message for chat templates, without empty fields: templates test which fields exist."""
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{field}.tool_calls", "must not be given unless role is assistant")
    if message.tool_call_id and message.role != "tool":
        raise InvalidRequest(f"{field}.tool_call_id", "must not be given unless role is tool")
    calls = [
        template_call(call.id, call.name, json_object(call.arguments, f"{field}.tool_calls[{index}].arguments"))
        for index, call in enumerate(message.tool_calls)
    ]
    more = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    return {"role": message.role, "content": message.content, **{name: each for name, each in more.items() if each}}


def _chosen(number: int, known: Mapping[int, Choice], name: Callable[[int], str], field: str) -> Choice | None:
    """The value of an enum's number; None if it is unspecified. Raises: InvalidRequest."""
    require(not number or number in known, field, f"one of {', '.join(map(name, known))}", number)
    return known.get(number)
