"""Converts protobuf to `Given`, which `deploy.api` checks.

Pure functions. Knows the generated messages; must not know gRPC, Serve or sessions (`deploy.grpc.responses` goes the
other way).
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from core.errors import InvalidRequest
from core.records import GIVEN_SAMPLING, GenerationRequest, Verification
from deploy import api
from deploy.api import (
    SERVICE_TIERS,
    Given,
    GivenTool,
    Served,
    ServiceTier,
    check_tools,
    json_object,
    require,
    template_call,
)
from deploy.calls import CallId
from protos.outrider.v1 import generation_pb2 as pb
from workers.grammar import STRUCTURES, Structure

MAX_TOOLS = 128
"""Same limit as for HTTP."""
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
    sampling, prompt = message.sampling, message.WhichOneof("prompt")
    return Given(
        text=message.text if prompt == "text" else None,
        token_ids=message.token_ids.ids if prompt == "token_ids" else None,
        **(_chat(message.chat) if prompt == "chat" else {}),
        request_id=message.request_id or (call.request_id if call is not None else ""),
        caller=call.caller if call is not None else "",
        priority=message.priority,
        service_tier=_service_tier(message.service_tier),
        sampling={name: getattr(sampling, name) for name in GIVEN_SAMPLING if sampling.HasField(name)},
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids or None,
        bad_words=sampling.bad_words,
        bad_word_ids=[word.ids for word in sampling.bad_word_ids],
        **_set(message.stopping),
        **{**_set(message.speculation), "verification": _verification(message.speculation.verification)},
        receipt=message.receipt,
        logprobs=_given(message, "logprobs"),
        prompt_logprobs=_given(message, "prompt_logprobs"),
        resume_token_ids=message.resume_token_ids,
        n=_given(message, "n"),
        resume_samples=[output.ids for output in message.resume_samples],
        timeout_s=_given(message, "timeout_s"),
        structure=_structure(message.structured_output) if message.HasField("structured_output") else None,
    )


def _set(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; the names match those of `Given`."""
    return {field.name: value for field, value in message.ListFields()}


def _structure(message: pb.StructuredOutput) -> Structure:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("structured_output", f"one of {', '.join(STRUCTURES)} must be given")
    return Structure(kind, message.choice.choices if kind == "choice" else getattr(message, kind))


def _given(message: Any, name: str) -> Any:
    """The value of an optional field; None if it is unset."""
    return getattr(message, name) if message.HasField(name) else None


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


def _verification(number: pb.Verification) -> Verification | None:
    if number == pb.VERIFICATION_UNSPECIFIED:
        return None
    allowed = f"one of {', '.join(map(pb.Verification.Name, VERIFICATIONS))}"
    require(number in VERIFICATIONS, "speculation.verification", allowed, number)
    return VERIFICATIONS[number]


def _service_tier(number: pb.ServiceTier) -> ServiceTier | None:
    if number == pb.SERVICE_TIER_UNSPECIFIED:
        return None
    require(number in TIERS, "service_tier", f"one of {', '.join(map(pb.ServiceTier.Name, TIERS))}", number)
    return TIERS[number]
