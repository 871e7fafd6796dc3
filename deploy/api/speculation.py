"""Checks the fields of `speculation`: how the output of a request is guessed and verified.

Pure functions, part of `request`. Every refusal names the field by its path in the proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from core.config import Limits, ServiceConfig, SpeculationConfig
from core.errors import InvalidRequest
from core.ranges import check, ranges_of
from core.records import GenerationRequest, Grammar, ModelInfo, Policy, SpeculationFields, Verification
from core.rules import Rule
from deploy.api.authentication import Caller
from deploy.api.checks import require, require_eos
from deploy.api.given import Given
from deploy.api.hosted import Served
from orchestrator.guessers import HEAD, available_sources
from workers.grammar import TEMPLATE_FIELD, template_of

POLICIES: dict[str, Policy] = {policy: policy for policy in get_args(Policy)}


def with_speculation(request: GenerationRequest, given: Given, served: Served) -> GenerationRequest:
    """The request with its speculation fields; all others are already set. Raises: InvalidRequest."""
    config, verification = served.config, _verification(given, served.config)
    _check_lenience(given, verification.rule)
    request = replace(
        request,
        verification=verification,
        policy=_policy(given.policy),
        guessers=_guessers(given.guessers, config.speculation, served.target),
        template=_template(given.template, served.target, config.limits),
        **_parameters(given),
    )
    _check_resumable(request)
    return replace(request, isolation=_isolation(given, request), learning=_learning(given))


def _verification(given: Given, config: ServiceConfig) -> Verification:
    """The request's rule, or the default. A relaxed rule must be allowed by the settings."""
    verification = given.verification or config.speculation.verification
    if not (verification.rule.is_lossless or config.speculation.allow_relaxed):
        problem = "is a relaxed rule, which this service does not allow (its setting speculation.allow_relaxed)"
        raise InvalidRequest("speculation.verification", f"{verification} {problem}")
    return verification


def _check_lenience(given: Given, rule: Rule) -> None:
    """Lenient rules require a lenience; others forbid it. Raises: InvalidRequest."""
    field = "speculation.lenience"
    if given.lenience is None and rule.takes_lenience:
        raise InvalidRequest(field, f"must be given with {rule.name} verification")
    if given.lenience is not None and not rule.takes_lenience:
        lenient = ", ".join(each for each in Verification if each.rule.takes_lenience)
        raise InvalidRequest(field, f"must not be given with {rule.name} verification: it is for {lenient}")


def _parameters(given: Given) -> dict[str, Any]:
    """The given parameters of speculation, each in its range. Raises: InvalidRequest."""
    names = [each.name for each in fields(SpeculationFields)]
    values = {name: value for name in names if (value := getattr(given, name)) is not None}
    for name, allowed in ranges_of(GenerationRequest).items():
        if name in values:
            check(f"speculation.{name}", values[name], allowed)
    return values


def _policy(given: str) -> Policy | None:
    require(given in ("", *POLICIES), "speculation.policy", f"one of {', '.join(POLICIES)}", given)
    return POLICIES.get(given)


def _guessers(given: Sequence[str], settings: SpeculationConfig, target: ModelInfo) -> tuple[str, ...]:
    names = [name for name in available_sources(settings) if name != HEAD or target.head]
    require(len(given) <= len(names), "speculation.guessers", f"at most {len(names)} names", len(given))
    for index, name in enumerate(given):
        require(name in names, f"speculation.guessers[{index}]", f"one of {', '.join(names)}", name)
        require(name not in given[:index], f"speculation.guessers[{index}]", "another name than those before", name)
    return tuple(given)


def _template(given: str | None, info: ModelInfo, limits: Limits) -> Grammar | None:
    if given is None:
        return None
    require_eos(TEMPLATE_FIELD, info)
    return template_of(given, limits)


def _check_resumable(request: GenerationRequest) -> None:
    if request.resume_tokens and not request.is_repeatable:
        raise InvalidRequest("resume_token_ids", not_repeatable(request))


def not_repeatable(request: GenerationRequest) -> str:
    """Why the output of such a request cannot be resumed."""
    return f"must be empty with {request.verification} verification: its output depends on the guesses it saw"


def _learning(given: Given) -> bool | None:
    """Whether the request may be learnt from: a key that rules it out has the last word."""
    return False if isinstance(given.caller, Caller) and not given.caller.learning else given.learning


def _isolation(given: Given, request: GenerationRequest) -> str:
    """Name of the group whose recent outputs may be used as guesses; empty for none.

    Also empty if the rule needs q and the caller gave the seed, because a kept output may have the same seed. The noise
    that drew that output would then also decide on it as a guess, and bias the new output (docs/exactness.md, section
    3). A seed drawn by the service is used only once.
    """
    shares_noise = request.rule.needs_q and "seed" in given.sampling
    return given.caller.isolation if isinstance(given.caller, Caller) and not shares_noise else ""
