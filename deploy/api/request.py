"""Checks a request field by field and turns it into a record, for every language of the API.

Pure functions. Knows the records and the tokenizer; must not know messages, bodies, Serve or sessions
(`deploy.grpc.translate` and `deploy.http.translate` provide the fields). Every refusal names the field by its path in
the proto, and comes before any model work.
"""

from __future__ import annotations

import json
import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from core.config import Limits, ServiceConfig
from core.errors import CheckpointError, InvalidRequest
from core.ranges import Range, shown
from core.records import MODEL_SAMPLING, PRIORITY, GenerationRequest, Grammar, ModelInfo, Sampling
from deploy.api.authentication import NO_LIMITS, Caller, KeyLimits
from deploy.api.checks import (
    allowed_token_ids,
    bad_words,
    check_masks,
    context_exceeded,
    logit_bias,
    require,
    require_eos,
    token_ids,
    within,
)
from deploy.api.given import JSON_SEEDS, Given
from deploy.api.hosted import Served
from deploy.api.source import beginning
from deploy.api.speculation import with_speculation
from deploy.calls import MAX_REQUEST_ID_CHARS, is_request_id
from workers.grammar import FIELD, grammar_of

USUAL_TOKENS = 256
"""If the caller sets no limit: maximum output tokens of a completion, and expected output tokens of a chat."""
MAX_TIMEOUT_S = 86_400.0


def sampling_defaults(model_dir: str | Path) -> Sampling:
    """Values of unset sampling fields: the model's generation_config.json, or temperature 1 and everything else off.

    Its `do_sample` is ignored: in this service a temperature of 0 means greedy.
    Raises: CheckpointError if the file is not JSON or has a value that no request may have.
    """
    file = Path(model_dir) / "generation_config.json"
    if not file.is_file():
        return Sampling()
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return Sampling(**{name: settings[name] for name in MODEL_SAMPLING if settings.get(name) is not None})
    except (ValueError, TypeError, AttributeError, InvalidRequest) as error:
        raise CheckpointError(f"{file} does not give sampling defaults: {error}") from error


def to_generation_request(given: Given, served: Served, now: float) -> GenerationRequest:
    """The request as a record, complete and within all limits. `now` is the service's clock, for the deadline.

    Raises: InvalidRequest.
    """
    info, limits = served.target, served.config.limits
    prompt, num_source = beginning(given, served)
    max_tokens = _max_tokens(given, len(prompt), num_source, served)
    stop_token_ids = _stop_token_ids(given.stop_token_ids, info, limits)
    sampling = replace(
        _sampling(given, served),
        min_tokens=_min_tokens(given.min_tokens, max_tokens),
        suppressed_ids=_ending_ids(given, stop_token_ids, info),
    )
    check_masks(sampling)
    request = GenerationRequest(
        request_id=_request_id(given.request_id),
        prompt=prompt,
        num_source=num_source,
        sampling=sampling,
        max_tokens=max_tokens,
        resume_tokens=resume_tokens(given, "resume_token_ids", given.resume_token_ids, sampling, max_tokens, info),
        stop=_stop_strings(given.stop, limits),
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=given.ignore_eos,
        adapter=served.adapter,
        include_stop=given.include_stop,
        grammar=_grammar(given, info, served.config),
        deadline=_deadline(given.timeout_s, now),
        priority=priority_of(given, served.config),
        caller=str(given.caller),
        quota=_key_limits(given).quota,
        expected_tokens=None if given.max_tokens is not None else min(max_tokens, USUAL_TOKENS),
    )
    return with_speculation(_with_reports(request, given, limits), given, served)


def _with_reports(request: GenerationRequest, given: Given, limits: Limits) -> GenerationRequest:
    """The request with its options for log probabilities, trace, explanation and receipt."""
    return replace(
        request,
        num_logprobs=within(given.logprobs, Range(0, limits.max_logprobs, is_whole=True), "logprobs"),
        num_prompt_logprobs=_num_prompt_logprobs(given.prompt_logprobs, len(request.prompt), limits),
        wants_trace=given.trace,
        wants_explanation=given.explain,
        wants_receipt=given.receipt,
    )


def _request_id(given: str) -> str:
    is_fit = not given or is_request_id(given)
    require(is_fit, "request_id", f"at most {MAX_REQUEST_ID_CHARS} printable characters", f"{len(given)} characters")
    return given or uuid.uuid4().hex


def _max_tokens(given: Given, prompt_len: int, num_source: int, served: Served) -> int:
    """Most output tokens, including resumed ones."""
    context = served.text_limit(num_source)
    room = context - prompt_len
    if room < 1:
        problem = f"must be at most {context - 1} tokens long, got {prompt_len}"
        raise context_exceeded(given.prompt_field, problem, context, prompt_len)
    if given.max_tokens is None:
        of_all = served.config.limits.default_max_tokens
        most = of_all if of_all is not None else room if given.chat is not None else USUAL_TOKENS
        return min(most, room)
    allowed = f"in [1, {room}] (a context of {context} less the prompt's {prompt_len})"
    field, asked = "stopping.max_tokens", given.max_tokens
    require(asked >= 1, field, allowed, asked)
    if asked > room:
        raise context_exceeded(field, f"must be {allowed}, got {shown(asked)}", context, prompt_len, asked)
    return asked


def _min_tokens(given: int, max_tokens: int) -> int:
    allowed = f"in [0, {max_tokens}] (the most tokens of output)"
    require(0 <= given <= max_tokens, "stopping.min_tokens", allowed, given)
    return given


def resume_tokens(
    given: Given, field: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, info: ModelInfo
) -> tuple[int, ...]:
    """The output that the caller already has. Raises: InvalidRequest, which names `field` or the missing seed."""
    resumed = token_ids(ids, field, info)
    allowed = f"at most {max_tokens} ids (the most tokens of output)"
    require(len(resumed) <= max_tokens, field, allowed, len(resumed))
    if resumed and not sampling.is_greedy and "seed" not in given.sampling:
        raise InvalidRequest("sampling.seed", "must be given to resume an output: the last chunk or the caller has it")
    return resumed


def _stop_token_ids(given: Sequence[int], info: ModelInfo, limits: Limits) -> tuple[int, ...]:
    field, most = "stopping.stop_token_ids", limits.max_stop_token_ids
    require(len(given) <= most, field, f"at most {most} ids", len(given))
    return token_ids(given, field, info)


def _ending_ids(given: Given, stop_token_ids: Sequence[int], info: ModelInfo) -> tuple[int, ...]:
    """The ids that end this output; they are suppressed before `min_tokens`.

    With `ignore_eos`, end-of-sequence tokens are ordinary: they end nothing and are never suppressed.
    """
    eos = () if given.ignore_eos else info.eos_token_ids
    return tuple(sorted({*eos, *stop_token_ids}))


def _stop_strings(given: Sequence[str], limits: Limits) -> tuple[str, ...]:
    most, longest = limits.max_stop_strings, limits.max_stop_chars
    require(len(given) <= most, "stopping.stop", f"at most {most} strings", len(given))
    for index, stop in enumerate(given):
        allowed = f"1 to {longest} characters long"
        require(1 <= len(stop) <= longest, f"stopping.stop[{index}]", allowed, len(stop))
    return tuple(given)


def _sampling(given: Given, served: Served) -> Sampling:
    """The given fields over the defaults. A missing seed is drawn here, so that the reply can report it."""
    info, limits = served.target, served.config.limits
    changes = {"seed": secrets.randbelow(JSON_SEEDS), **given.sampling}
    try:
        return replace(
            served.defaults,
            **changes,
            logit_bias=logit_bias(given.logit_bias, info, limits),
            allowed_token_ids=allowed_token_ids(given.allowed_token_ids, info, limits),
            bad_words=bad_words(given.bad_words, given.bad_word_ids, served.tokenizer, info, limits),
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.{error.field}", error.problem) from None


def _num_prompt_logprobs(given: int | None, prompt_len: int, limits: Limits) -> int | None:
    if given is None:
        return None
    require(0 <= given <= limits.max_logprobs, "prompt_logprobs", f"in [0, {limits.max_logprobs}]", given)
    most = limits.max_scored_tokens
    if prompt_len > most:
        raise InvalidRequest(
            "prompt_logprobs", f"must be unset for a prompt of more than {most} tokens, got {prompt_len}"
        )
    return given


def _key_limits(given: Given) -> KeyLimits:
    return given.caller.limits if isinstance(given.caller, Caller) else NO_LIMITS


def priority_of(given: Given, config: ServiceConfig) -> int:
    """The request's priority, or that of its service tier, limited by the caller's key or else by the settings.

    Raises: InvalidRequest; a priority is never changed silently.
    """
    own, tier = _key_limits(given).max_priority, given.service_tier
    first = config.limits.max_priority if own is None else own
    source = "the setting limits.max_priority" if own is None else "max_priority of this caller's key"
    allowed = f"at least {first}, the most urgent by {source}, got"
    if tier is None:
        require(given.priority in PRIORITY, "priority", str(PRIORITY), given.priority)
        if given.priority < first:
            raise InvalidRequest("priority", f"must be {allowed} {given.priority}")
        return given.priority
    if given.priority:
        raise InvalidRequest("priority", "must not be given beside service_tier, which stands for one")
    priority = config.tiers.priority_of(tier)
    if priority < first:
        raise InvalidRequest("service_tier", f"must stand for a priority of {allowed} {tier}, which is {priority}")
    return priority


def _grammar(given: Given, info: ModelInfo, config: ServiceConfig) -> Grammar | None:
    if given.structure is None:
        return None
    require_eos(FIELD, info)
    if given.ignore_eos:
        raise InvalidRequest("stopping.ignore_eos", f"must be false beside {FIELD}: nothing else ends the output")
    if given.allowed_token_ids is not None:
        raise InvalidRequest(
            "sampling.allowed_token_ids", f"must not be given beside {FIELD}, which says what may come"
        )
    return grammar_of(given.structure, config.limits, closes_schemas=config.close_schemas)


def _deadline(timeout_s: float | None, now: float) -> float | None:
    if timeout_s is None:
        return None
    is_allowed = math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S
    require(is_allowed, "timeout_s", f"in (0, {MAX_TIMEOUT_S:g}]", timeout_s)
    return now + timeout_s
