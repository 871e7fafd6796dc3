"""What a caller gives, in any language of the API, before it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from core.errors import InvalidRequest
from core.records import Verification
from workers.grammar import Structure

MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling fields for which a model may bring its own defaults."""
GIVEN_SAMPLING = (*MODEL_SAMPLING, "presence_penalty", "frequency_penalty", "seed")
"""Sampling fields that callers may give as they are."""

JSON_SEEDS = 2**53
"""Seeds that are made here lie below: a double, as JavaScript reads JSON's numbers, has all of them."""
MIN_SEED = -(2**63)

ServiceTier = Literal["default", "flex", "priority"]
"""A name for a priority in the queue for places."""
SERVICE_TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)

Chat = Sequence[Mapping[str, Any]]
"""Messages, each with `role` and `content`, and what else the model's chat template may know."""


def given_sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of GIVEN_SAMPLING that are given, in the spellings of other servers, too.

    -1 as `top_k` keeps all; -1 as `seed` has one drawn, and any other negative seed stands for one below JSON_SEEDS.
    """
    sampling = {name: value for name in GIVEN_SAMPLING if (value := fields.get(name)) is not None}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if (seed := sampling.get("seed", 0)) == -1:
        del sampling["seed"]
    elif MIN_SEED <= seed < 0:
        sampling["seed"] = seed % JSON_SEEDS
    return sampling


@dataclass(frozen=True, slots=True)
class GivenTool:
    """A tool of a chat, and where it stands."""

    field: str
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """The JSON schema of its arguments; None takes any object."""
    schema_name: str = "parameters"
    """What the API calls that schema."""

    @property
    def for_template(self) -> dict[str, Any]:
        """As chat templates have it."""
        function = {"name": self.name, "description": self.description or "", "parameters": {**(self.parameters or {})}}
        return {"type": "function", "function": function}


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call that the model has made, as chat templates have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {**arguments}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a caller gives, by the proto's names, before it is checked; None, or nothing, where it gives nothing."""

    text: str | None = None
    """The prompt; or it is one of the next two."""
    token_ids: Sequence[int] | None = None
    chat: Chat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """Of a chat, as its template has them."""
    continues: bool = False
    """The output goes on with the chat's last message."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else the chat's template is given."""
    request_id: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """By names in GIVEN_SAMPLING."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    verification: Verification | None = None
    lenience: float | None = None
    max_draft_tokens: int | None = None
    policy: str = ""
    pipelining: bool | None = None
    guessers: Sequence[str] = ()
    template: str | None = None
    draft_temperature: float | None = None
    trace: bool = False
    explain: bool = False
    receipt: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    resume_token_ids: Sequence[int] = ()
    truncate_prompt_tokens: int | None = None
    """Tokens of the prompt to keep, the last ones; -1 keeps as many as leave room for the output."""
    n: int | None = None
    resume_samples: Sequence[Sequence[int]] = ()
    """Of each sample."""
    timeout_s: float | None = None
    priority: int = 0
    service_tier: ServiceTier | None = None
    """In place of a priority."""
    caller: str = ""
    """Known by its token, not by what it says."""
    structure: Structure | None = None

    @property
    def prompt_field(self) -> str:
        """Which of the three the prompt is. Raises: InvalidRequest when it is none."""
        for name in ("text", "token_ids", "chat"):
            if getattr(self, name) is not None:
                return name
        raise InvalidRequest("prompt", "one of text, token_ids and chat must be given")
