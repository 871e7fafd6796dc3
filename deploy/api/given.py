"""A request as the caller sent it, in any language of the API, before it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from core.errors import InvalidRequest
from core.records import GIVEN_SAMPLING, SpeculationFields, Verification
from workers.grammar import Structure

JSON_SEEDS = 2**53
"""Upper bound of seeds drawn here. A double, as in JavaScript's JSON, represents all of them exactly."""
MIN_SEED = -(2**63)

ServiceTier = Literal["default", "flex", "priority"]
"""Name of a queue priority."""
SERVICE_TIERS: tuple[ServiceTier, ...] = get_args(ServiceTier)

Chat = Sequence[Mapping[str, Any]]
"""Messages with `role`, `content`, and any fields that the model's chat template uses."""


def given_sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields of GIVEN_SAMPLING, with other servers' special values converted.

    A `top_k` of -1 keeps all tokens. A `seed` of -1 is dropped, so that one is drawn; other negative seeds are reduced
    modulo JSON_SEEDS.
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
    """A tool of a chat. `field` is its path in the request."""

    field: str
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments; None allows any object."""
    schema_name: str = "parameters"
    """The API's name for that schema."""

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description or "", "parameters": {**(self.parameters or {})}}
        return {"type": "function", "function": function}


def template_call(call_id: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call by the model, in the form that chat templates expect."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {**arguments}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(SpeculationFields):
    """The fields of a request before they are checked, by the proto's names. Unset fields are None or empty."""

    text: str | None = None
    """The prompt; exactly one of `text`, `token_ids` and `chat` is given."""
    token_ids: Sequence[int] | None = None
    source: str | None = None
    """Text for an encoder-decoder's encoder; the prompt then begins the decoder's text."""
    source_token_ids: Sequence[int] | None = None
    chat: Chat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of a chat, in the form that its template expects."""
    continues: bool = False
    """Whether the output continues the chat's last message."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Extra variables for the chat template."""
    request_id: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Values by names in GIVEN_SAMPLING."""
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
    policy: str = ""
    guessers: Sequence[str] = ()
    template: str | None = None
    trace: bool = False
    explain: bool = False
    receipt: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    resume_token_ids: Sequence[int] = ()
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep from the end of the prompt; -1 keeps as many as leave room for the output."""
    n: int | None = None
    resume_samples: Sequence[Sequence[int]] = ()
    """Output tokens to resume, for each sample."""
    timeout_s: float | None = None
    priority: int = 0
    service_tier: ServiceTier | None = None
    """Alternative to `priority`."""
    caller: str = ""
    """Name from authentication, never from the request itself."""
    structure: Structure | None = None

    @property
    def prompt_field(self) -> str:
        """Name of the prompt field that is set. Raises: InvalidRequest if none is."""
        for name in ("text", "token_ids", "chat"):
            if getattr(self, name) is not None:
                return name
        if self.source is not None or self.source_token_ids is not None:
            return "source"
        raise InvalidRequest("prompt", "one of text, token_ids and chat must be given")
