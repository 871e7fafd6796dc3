"""Converts a body to `Given`, which `deploy.api` checks and turns into a record.

Pure functions. Refusals name fields by their names in the body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from core.errors import InvalidRequest
from core.records import GIVEN_SAMPLING, GenerationRequest, Verification
from deploy import api
from deploy.api import Given, Served, given_sampling, require
from deploy.http.bodies import EFFORT, Body, Speculation
from deploy.http.failures import MAX_SHOWN_CHARS
from deploy.http.output import Reading, calls_format, has_begun, reasoning_format
from deploy.http.structured import Held, held_to, refusal_of_tool
from deploy.http.tools import AskedTools, require_calls

COPIED = (
    "allowed_token_ids", "bad_words", "bad_word_ids", "max_tokens", "min_tokens", "stop", "stop_token_ids",
    "ignore_eos", "include_stop", "priority", "timeout_s", "receipt", "truncate_prompt_tokens",
)  # fmt: skip
"""Fields with the same name in bodies and in `Given`."""
MAX_ID_DIGITS = 20
STRUCTURE = "structured_output"
_PARAMS = (
    (re.compile(r"^(sampling|stopping)\."), ""),
    (re.compile(r"^(text|token_ids(\.ids)?|chat(\.messages)?)\b"), "prompt"),
    (re.compile(r"^beams\.beam_width"), "best_of"),
    (re.compile(r"^beams\."), ""),
    (re.compile(r"^beams$"), "use_beam_search"),
    (re.compile(r"^source_token_ids(\.ids)?"), "source"),
    (re.compile(r"^(bad_word_ids\[\d+\])\.ids\b"), r"\1"),
)
"""Pairs of a field's path in the proto and its path in the body, the same for all bodies."""


def _held(body: Body, asked: AskedTools | None, served: Served) -> Held | None:
    """The required structure of the output, forced tool calls included. Raises: InvalidRequest."""
    if asked is None:
        return held_to(body, None, None)
    return held_to(body, asked, require_calls(calls_format(served.config.http, served.tokenizer), served.tokenizer))


def reading_of(body: Body, request: GenerationRequest, served: Served) -> Reading:
    """Parts to look for in the outputs. An output that follows a grammar has no reasoning."""
    if body.prompts_given:  # building a long chat a second time would block the event loop
        return Reading()
    config, tokenizer = served.config.http, served.tokenizer
    asked = body.tools_asked
    reasoning = reasoning_format(config, tokenizer) if request.grammar is None else None
    begun = reasoning is not None and has_begun(reasoning, request.prompt, tokenizer)
    if asked is None:
        return Reading(reasoning=reasoning, has_begun=begun)
    calls, names = calls_format(config, tokenizer), frozenset(asked.schemas)
    return Reading(calls, names, asked.is_forced, 1 if asked.is_one else None, reasoning, begun)


def to_requests(body: Body, served: Served, now: float, request_id: str, caller: str = "") -> list[GenerationRequest]:
    """One request for each output of each prompt, complete and within all limits. Raises: InvalidRequest."""
    body.check()
    asked = body.tools_asked
    held = _held(body, asked, served)
    given = given_by(body, served, asked, held, request_id, caller)
    if not body.prompts_given:
        with _renamed(partial(_named, body, held)), _tools_named(asked, held, served):
            return api.to_requests(given, served, now)
    requests: list[GenerationRequest] = []
    for index, prompt in enumerate(body.prompts_given):
        which = f"[{index}]" if len(body.prompts_given) > 1 else ""
        with _renamed(partial(_named, body, held, which_prompt=which)):
            requests += api.to_requests(replace(given, **_prompt(prompt)), served, now)
    return requests


def _prompt(prompt: str | list[int]) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def prompt_of(body: Body, served: Served) -> tuple[int, ...]:
    """The token ids of the prompt. Raises: InvalidRequest."""
    asked = body.tools_asked
    held = _held(body, asked, served)
    with _renamed(partial(_named, body, held)):
        return api.beginning(given_by(body, served, asked, held), served)[0]


@contextmanager
def _tools_named(asked: AskedTools | None, held: Held | None, served: Served) -> Iterator[None]:
    """Make the refusal of an invalid schema name its tool."""
    try:
        yield
    except InvalidRequest as error:
        form = calls_format(served.config.http, served.tokenizer)
        is_of_grammar = held is not None and error.field == held[1].field
        if asked is None or form is None or not is_of_grammar:
            raise
        raise refusal_of_tool(asked, form, served.config) or error from None


def later_named_as_in(body: Body, served: Served) -> AbstractContextManager[None]:
    """Rename the fields in errors that engines raise for a request which has passed all checks."""
    return _renamed(partial(named_as_in, body, served))


@contextmanager
def _renamed(rename: Callable[[InvalidRequest], InvalidRequest]) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise rename(error) from None


def named_as_in(body: Body, served: Served, error: InvalidRequest) -> InvalidRequest:
    """The error with the body's own field name."""
    return _named(body, _held(body, body.tools_asked, served), error)


def _named(body: Body, held: Held | None, error: InvalidRequest, which_prompt: str = "") -> InvalidRequest:
    field, problem = param_of(error.field, body, held), error.problem
    if which_prompt and field.partition("[")[0] == body.PROMPT:
        field = body.PROMPT + which_prompt + field.removeprefix(body.PROMPT)
    if held is not None:
        problem = problem.replace(STRUCTURE, held[0])
    return type(error)(field, problem)


def _check_reports(body: Body, speculation: Speculation) -> None:
    given = {
        "receipt": body.receipt,
        "speculation.explain": speculation.explain,
        "speculation.trace": speculation.trace,
    }
    for field, value in given.items():
        if value and not body.HAS_CHOICES:
            raise InvalidRequest(field, "is for /v1/completions and /v1/chat/completions: no other reply has a place")


def _template_arguments(body: Body, served: Served) -> Mapping[str, Any]:
    """The chat template's variables. Raises: InvalidRequest if the template cannot use the effort."""
    if body.effort_asked is None:
        return body.template_arguments
    field, effort = body.effort_asked
    known: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {}
    if EFFORT in served.tokenizer.template_variables:
        known[EFFORT] = effort
    if not known:
        problem = f"is not supported: this model's chat template has no {EFFORT}, and takes what it has by"
        raise InvalidRequest(field, f'{problem} chat_template_kwargs, as {{"enable_thinking": true}}')
    return {**known, **body.template_arguments}


def given_by(
    body: Body, served: Served, asked: AskedTools | None, held: Held | None, request_id: str = "", caller: str = ""
) -> Given:
    """The body's fields. Prompts other than a chat are left out.

    Raises: InvalidRequest for a field that this kind of body cannot have.
    """
    speculation = body.speculation or Speculation()
    _check_reports(body, speculation)
    if getattr(body, "store", None) is False:
        speculation = speculation.model_copy(update={"learning": False})
    return Given(
        chat=body.chat,
        continues=body.continues,
        tools=asked.shown if asked is not None else (),
        template_arguments=_template_arguments(body, served),
        request_id=request_id,
        caller=caller,
        service_tier=body.tier_asked,
        sampling=given_sampling({name: getattr(body, name) for name in GIVEN_SAMPLING}),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=0 if body.ranks_samples and body.num_logprobs is None else body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        structure=held and held[1],
        beams=body.beams_asked,
        n=body.num_samples,
        source=body.source if isinstance(body.source, str) else None,
        source_token_ids=None if isinstance(body.source, str) else body.source,
        **{name: value for name in COPIED if (value := getattr(body, name, None)) is not None},
        **{**speculation.model_dump(exclude_none=True), "verification": _verification(speculation.verification)},
    )


def param_of(field: str, body: Body, held: Held | None) -> str:
    """The body's path of a field that has the proto's path."""
    for pattern, replacement in _PARAMS:
        field = pattern.sub(replacement, field)
    if field.startswith(STRUCTURE) and held is not None:
        return held[0] + field.removeprefix(held[1].field).removeprefix(STRUCTURE)
    return body.param_of(field)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS)), None)
    require(wrong is None, "logit_bias", "of token ids, as strings of digits", wrong and wrong[:MAX_SHOWN_CHARS])
    return {int(key): bias for key, bias in given.items()}


def _verification(given: str | None) -> Verification | None:
    if given is None:
        return None
    require(given in tuple(Verification), "speculation.verification", f"one of {', '.join(Verification)}", given)
    return Verification[given.upper()]
