"""Parts shared by OpenAI's bodies, and the body of /v1/completions.

Knows the meaning of each field; must not know replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator

from core.errors import InvalidRequest
from deploy.api import GivenBeams, ServiceTier, require
from deploy.http.bodies import Body, Ignored, Part, TextContent, neutral, strings
from workers.grammar import Structure

PROMPTS = "must be a string, a list of token ids, or a list of several of either"
MAX_PROMPTS = 2048
RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def _prompts(value: Any) -> list[str | list[int]]:
    """A list of prompts from one prompt, or from several of one kind. Raises: ValueError."""
    are_several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if are_several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"must have at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    if all(isinstance(each, str) for each in prompts) or all(_are_ids(each) for each in prompts):
        return prompts
    raise ValueError(PROMPTS)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


NO_MODERATION = "this server moderates nothing"
ROLES = {"developer": "system"}
"""Roles that chat templates do not know, and the roles that replace them."""


class TextPart(TextContent):
    prompt_cache_breakpoint: Ignored = None


class RefusalPart(TextContent):
    text: Annotated[str, Field(alias="refusal")]


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far."""
    include_obfuscation: Ignored = None


class JsonSchema(Part):
    """Schema of `response_format`. The output always follows it; `strict` is ignored."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class ResponseFormat(Part):
    type: str
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Accepted with json_object, as in other servers."""


class OpenAiBody(Body):
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    # Hints for other servers. They change no output.
    user: Ignored = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None

    @property
    def tier_asked(self) -> ServiceTier | None:
        return None if self.service_tier == "auto" else self.service_tier

    @property
    def tier_served(self) -> ServiceTier:
        """Service tier to report: the requested one, or the default."""
        return self.tier_asked or "default"


class SampledBody(OpenAiBody):
    """Fields shared by completions and chat completions."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: Annotated[list[str], PlainValidator(strings)] = Field(default=[])
    response_format: ResponseFormat | None = None
    HAS_CHOICES: ClassVar[bool] = True

    use_beam_search: bool | None = None
    """The field of vLLM: a beam search with `best_of` beams, or else `n`."""
    best_of: int | None = None
    """Number of samples, of which the `n` with the largest mean log probability are returned; or the number of
    beams."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    return_token_ids: bool | None = None
    """Includes the prompt's token ids."""
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    store: bool | None = None
    """Nothing is stored. False also keeps the request from being learnt from (`speculation.learning`)."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def format_asked(self) -> tuple[str, Structure] | None:
        given, field = self.response_format, "response_format"
        if given is None:
            return None
        if given.type == "json_object" and given.schema_ is not None and given.json_schema is None:
            return (f"{field}.schema", Structure("json_schema", given.schema_))
        if given.schema_ is not None:
            raise InvalidRequest(f"{field}.schema", "must not be given unless type is json_object: send json_schema")
        schema = None if given.json_schema is None else given.json_schema.schema_
        return structure_of_format(field, given.type, schema, f"{field}.json_schema", f"{field}.json_schema.schema")

    @property
    def num_samples(self) -> int | None:
        return self.best_of if self.ranks_samples else self.n

    @property
    def ranks_samples(self) -> bool:
        return not self.use_beam_search and self.best_of is not None and self.best_of != (self.n or 1)

    @property
    def beams_asked(self) -> GivenBeams | None:
        if not self.use_beam_search:
            return None
        width = self.best_of if self.best_of is not None else self.n or 1
        return GivenBeams(
            beam_width=width, length_penalty=self.length_penalty, early_stopping=self.early_stopping or False
        )

    def check(self) -> None:
        """Raises: InvalidRequest."""
        if not self.use_beam_search:
            self._check_ranked()
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) not in (None, default):
                    raise InvalidRequest(name, "must not be given unless use_beam_search is true")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "must not be given unless stream is true")

    def _check_ranked(self) -> None:
        """Raises: InvalidRequest."""
        if not self.ranks_samples:
            return
        n = 1 if self.n is None else self.n
        require(n >= 1, "n", "at least 1", n)
        require((self.best_of or 0) >= n, "best_of", f"at least n ({n})", self.best_of)
        if self.stream:
            raise InvalidRequest("best_of", "must be n or unset in a stream: the best samples are known at their end")
        if self.num_prompt_logprobs is not None:
            raise InvalidRequest("best_of", "must be n or unset where a prompt's logprobs are asked for")

    def param_of(self, field: str) -> str:
        return super().param_of("best_of" if field == "n" and self.ranks_samples else field)


def structure_of_format(
    field: str, kind: str, schema: dict[str, Any] | None, given_at: str, schema_at: str
) -> tuple[str, Structure] | None:
    """The field and structure of an output format. Raises: InvalidRequest."""
    require(kind in RESPONSE_FORMATS, f"{field}.type", f"one of {', '.join(RESPONSE_FORMATS)}", kind)
    if kind == "json_schema":
        if schema is None:
            raise InvalidRequest(given_at, "must be given with this type")
        return (schema_at, Structure("json_schema", schema))
    if schema is not None:
        raise InvalidRequest(given_at, "must not be given unless type is json_schema")
    return (field, Structure("json_object", True)) if kind == "json_object" else None


class CompletionBody(SampledBody):
    """The body of /v1/completions."""

    PROMPT: ClassVar[str] = "prompt"

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[Any, neutral("", reason="the models here complete, they do not insert")] = None

    @property
    def prompts_given(self) -> Sequence[str | list[int]]:
        return self.prompt

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [each for each in (self.prompt_logprobs, self.logprobs if self.echo else None) if each is not None]
        return max(asked, default=None)

    def check(self) -> None:
        """Raises: InvalidRequest."""
        super().check()
        if self.echo and self.logprobs is not None and (self.n or 1) > 1:
            raise InvalidRequest("n", f"must be 1 where a prompt is repeated with its logprobs, got {self.n}")

    def param_of(self, field: str) -> str:
        is_echo = field == "prompt_logprobs" and self.prompt_logprobs is None
        return super().param_of("logprobs" if is_echo else field)
