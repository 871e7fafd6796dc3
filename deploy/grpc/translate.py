"""From the wire to the core: a message says what was given, which `deploy.api` checks.

Pure functions. Knows the generated messages; must not know gRPC, Serve or sessions (`deploy.grpc.responses` goes the
other way).
"""

from __future__ import annotations

from typing import Any

from core.config import ServiceConfig
from core.records import GenerationRequest, ModelInfo, Sampling, Verification
from deploy import api
from deploy.api import GIVEN_SAMPLING, Given, require
from orchestrator.text import Tokenizer
from protos.outrider.v1 import generation_pb2 as pb

VERIFICATION_PREFIX = "VERIFICATION_"
VERIFICATIONS = {pb.Verification.Value(VERIFICATION_PREFIX + each.name): each for each in Verification}


def to_generation_request(
    message: pb.GenerateRequest,
    *,
    tokenizer: Tokenizer,
    info: ModelInfo,
    defaults: Sampling,
    config: ServiceConfig,
    now: float,
) -> GenerationRequest:
    """The request as a record, complete and within all limits. `now` is the service's clock, for the deadline.

    Raises: InvalidRequest.
    """
    return api.to_generation_request(
        given_by(message), tokenizer=tokenizer, info=info, defaults=defaults, config=config, now=now
    )


def given_by(message: pb.GenerateRequest) -> Given:
    """What the message gives. Raises: InvalidRequest for a verification that has no name."""
    sampling, stopping, speculation = message.sampling, message.stopping, message.speculation
    prompt = message.WhichOneof("prompt")
    return Given(
        text=message.text if prompt == "text" else None,
        token_ids=message.token_ids.ids if prompt == "token_ids" else None,
        chat=[_chat_message(each) for each in message.chat.messages] if prompt == "chat" else None,
        request_id=message.request_id,
        sampling={name: getattr(sampling, name) for name in GIVEN_SAMPLING if sampling.HasField(name)},
        logit_bias=sampling.logit_bias,
        max_tokens=_given(stopping, "max_tokens"),
        min_tokens=stopping.min_tokens,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop,
        verification=_verification(speculation.verification),
        max_draft_tokens=_given(speculation, "max_draft_tokens"),
        policy=speculation.policy,
        pipelining=_given(speculation, "pipelining"),
        wants_trace=speculation.trace,
        num_logprobs=_given(message, "logprobs"),
        resume_token_ids=message.resume_token_ids,
        timeout_s=_given(message, "timeout_s"),
    )


def _given(message: Any, name: str) -> Any:
    """The value of an optional field; None when it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def _chat_message(message: pb.ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _verification(number: pb.Verification) -> Verification | None:
    if number == pb.VERIFICATION_UNSPECIFIED:
        return None
    allowed = f"one of {', '.join(map(pb.Verification.Name, VERIFICATIONS))}"
    require(number in VERIFICATIONS, "speculation.verification", allowed, number)
    return VERIFICATIONS[number]
