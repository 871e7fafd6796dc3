"""From a body to the core: it says what was given, which `deploy.api` checks and makes a record of.

Pure functions (`deploy.http.responses` goes the other way). Refusals name fields as the body has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from core.config import ServiceConfig
from core.errors import InvalidRequest
from core.records import GenerationRequest, ModelInfo, Sampling, Verification
from deploy import api
from deploy.api import GIVEN_SAMPLING, Given, require
from deploy.http.bodies import MAX_SHOWN_CHARS, AnyBody, Body, ChatBody, CompletionBody, Speculation
from deploy.http.structured import structure_of
from orchestrator.text import Tokenizer

MAX_ID_DIGITS = 20
STRUCTURE = "structured_output"
_PARAMS = (
    (re.compile(r"^(sampling|stopping)\."), ""),
    (re.compile(r"^(text|token_ids(\.ids)?)\b"), "prompt"),
    (re.compile(r"^chat(\.messages)?\b"), "messages"),
    (re.compile(r"^prompt_logprobs$"), "logprobs"),
    (re.compile(r"^(bad_word_ids\[\d+\])\.ids\b"), r"\1"),
)
"""From a field's path in the proto to the body's."""


def to_requests(
    body: AnyBody,
    request_id: str,
    caller: str = "",
    *,
    tokenizer: Tokenizer,
    info: ModelInfo,
    defaults: Sampling,
    config: ServiceConfig,
    now: float,
) -> list[GenerationRequest]:
    """One record for each of the `n` outputs, complete and within all limits. Raises: InvalidRequest."""
    try:
        given = given_by(body, request_id, caller)
        return api.to_requests(given, tokenizer=tokenizer, info=info, defaults=defaults, config=config, now=now)
    except InvalidRequest as error:
        raise InvalidRequest(param_of(error.field, body), error.problem) from None


def given_by(body: AnyBody, request_id: str, caller: str = "") -> Given:
    """What the body gives. Raises: InvalidRequest for what only a body can have wrong."""
    _check_combinations(body)
    prompt = body.prompt if isinstance(body, CompletionBody) else None
    speculation = body.speculation or Speculation()
    structure = structure_of(body)
    return Given(
        text=prompt if isinstance(prompt, str) else None,
        token_ids=prompt if isinstance(prompt, list) else None,
        chat=_chat(body) if isinstance(body, ChatBody) else None,
        request_id=request_id,
        caller=caller,
        priority=body.priority or 0,
        sampling={name: value for name in GIVEN_SAMPLING if (value := getattr(body, name)) is not None},
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words or (),
        bad_word_ids=body.bad_word_ids or (),
        max_tokens=body.asked_max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        verification=_verification(speculation.verification),
        lenience=speculation.lenience,
        max_draft_tokens=speculation.max_draft_tokens,
        policy=speculation.policy or "",
        pipelining=speculation.pipelining,
        guessers=speculation.guessers or (),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_logprobs if isinstance(body, CompletionBody) and body.echo else None,
        num_samples=body.n,
        timeout_s=body.timeout_s,
        structure=structure and structure[1],
    )


def param_of(field: str, body: Body) -> str:
    """The body's own path of a field that is named by its path in the proto."""
    for pattern, replacement in _PARAMS:
        field = pattern.sub(replacement, field)
    if field.startswith(STRUCTURE) and (structure := structure_of(body)) is not None:
        return structure[0] + field.removeprefix(structure[1].field).removeprefix(STRUCTURE)
    if isinstance(body, ChatBody):
        if field == "logprobs":
            return "top_logprobs"
        if field == "max_tokens" and body.max_completion_tokens is not None:
            return "max_completion_tokens"
    return field


def _check_combinations(body: AnyBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "must not be given unless stream is true")
    if isinstance(body, CompletionBody):
        if body.echo and body.logprobs is not None and (body.n or 1) > 1:
            raise InvalidRequest("n", f"must be 1 where a prompt is repeated with its logprobs, got {body.n}")
        return
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "must not be given unless logprobs is true")
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise InvalidRequest(
            "max_completion_tokens", f"must be the same as max_tokens, got {body.max_completion_tokens}"
        )


def _chat(body: ChatBody) -> list[dict[str, str]]:
    messages = ({"role": each.role, "content": each.content, "name": each.name} for each in body.messages)
    return [{name: value for name, value in each.items() if value is not None} for each in messages]


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS)), None)
    require(wrong is None, "logit_bias", "of token ids, as strings of digits", wrong and wrong[:MAX_SHOWN_CHARS])
    return {int(key): bias for key, bias in given.items()}


def _verification(given: str | None) -> Verification | None:
    if given is None:
        return None
    require(given in tuple(Verification), "speculation.verification", f"one of {', '.join(Verification)}", given)
    return Verification[given.upper()]
