"""The bodies that clients send, as OpenAI's API has them, with this project's own fields beside.

Types are checked here, and each refusal names the field by its path in the body; ranges are checked in `deploy.api`,
for all languages alike. null is the same as no field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
)

from core.errors import InvalidRequest

MAX_SHOWN_CHARS = 60
"""Of a wrong value, in a refusal."""

MAX_MESSAGES = 4096
MAX_ENTRIES = 4096
"""Entries that are looked at: pydantic makes an object of each wrong one, and holds up the event loop meanwhile."""

ONE_PROMPT = "must be a string or a list of token ids (one prompt a request)"


def _prompt(value: Any) -> str | list[int]:
    """One prompt; a list of one is taken for it."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(each) is int for each in value)):
        return value
    raise ValueError(ONE_PROMPT)


def _few(value: Any) -> Any:
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ValueError(f"must have at most {MAX_ENTRIES} entries, got {len(value)}")
    return value


def _strings(value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return given
    raise ValueError("must be a string or a list of strings")


def _content(value: Any) -> Any:
    """Text, or the texts of parts; an assistant's message may have none."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    return "\n".join(map(_part, value))


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise ValueError('must be a string or a list of {"type": "text", "text": ...}: this server takes text alone')


def _neutral(*allowed: Any, reason: str) -> Any:
    """A field of OpenAI's that is refused unless its value changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError(reason)
        return value

    return Annotated[Any, AfterValidator(check)]


_Ignored = Annotated[Any, Field(default=None)]
NO_TOOLS = "is not supported: this server does not parse tool calls"
NO_AUDIO = "is not supported: this server writes text alone"


class Part(BaseModel):
    """Of a body: no unknown fields, and no value of another type than its field's."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Part):
    """What a stream carries beside its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""
    include_obfuscation: _Ignored = None


class Speculation(Part):
    """SpeculationParams of the proto."""

    max_draft_tokens: int | None = None
    verification: str | None = None
    lenience: float | None = None
    policy: str | None = None
    pipelining: bool | None = None
    guessers: Annotated[list[str] | None, BeforeValidator(_few)] = None


class JsonSchema(Part):
    """Of OpenAI's `response_format`. An output keeps to the schema whether `strict` is given or not."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    name: _Ignored = None
    description: _Ignored = None
    strict: _Ignored = None


class ResponseFormat(Part):
    """As OpenAI has it."""

    type: str
    json_schema: JsonSchema | None = None


_Choice = Annotated[list[str] | None, BeforeValidator(_few)]


class StructuredOutputs(Part):
    """As vLLM has it."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: _Choice = None
    grammar: str | None = None


class Body(Part):
    """What completions and chat completions have in common."""

    MAX_TOKENS: ClassVar[tuple[str, ...]] = ("max_tokens",)

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few)] = None
    seed: int | None = None
    stop: Annotated[list[str], PlainValidator(_strings)] = []
    response_format: ResponseFormat | None = None

    # This project's own, by the names of the proto and of vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: Annotated[list[int] | None, FailFast(), BeforeValidator(_few)] = None
    bad_words: Annotated[list[str] | None, FailFast(), BeforeValidator(_few)] = None
    bad_word_ids: Annotated[list[list[int]] | None, FailFast(), BeforeValidator(_few)] = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_few)] = None
    include_stop_str_in_output: bool | None = None
    speculation: Speculation | None = None
    timeout_s: float | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Choice = None
    guided_grammar: str | None = None

    # Hints for other servers, which change no output.
    user: _Ignored = None
    metadata: _Ignored = None
    store: _Ignored = None
    service_tier: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    prompt_cache_retention: _Ignored = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None reports nothing."""
        raise NotImplementedError


class CompletionBody(Body):
    """/v1/completions"""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: _neutral(1, reason="must be 1: this server returns every output that it makes") = None  # type: ignore[valid-type]
    suffix: _neutral("", reason="is not supported: the models here complete, they do not insert") = None  # type: ignore[valid-type]

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class Message(Part):
    """Of a chat. What the model answered before may come back as it was given."""

    role: str
    content: Annotated[str, BeforeValidator(_content)] = ""
    name: str | None = None
    refusal: str | None = None
    annotations: _neutral([], reason="is not supported") = None  # type: ignore[valid-type]
    audio: _neutral(reason=NO_AUDIO) = None  # type: ignore[valid-type]
    function_call: _neutral(reason=NO_TOOLS) = None  # type: ignore[valid-type]
    tool_calls: _neutral([], reason=NO_TOOLS) = None  # type: ignore[valid-type]


class ChatBody(Body):
    """/v1/chat/completions"""

    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: _Ignored = None
    tools: _neutral([], reason=NO_TOOLS) = None  # type: ignore[valid-type]
    tool_choice: _neutral("none", "auto", reason=NO_TOOLS) = None  # type: ignore[valid-type]
    functions: _neutral([], reason=NO_TOOLS) = None  # type: ignore[valid-type]
    function_call: _neutral("none", "auto", reason=NO_TOOLS) = None  # type: ignore[valid-type]
    modalities: _neutral(["text"], reason=NO_AUDIO) = None  # type: ignore[valid-type]
    audio: _neutral(reason=NO_AUDIO) = None  # type: ignore[valid-type]
    prediction: _neutral(reason="is not supported: this server drafts by itself") = None  # type: ignore[valid-type]
    reasoning_effort: _neutral("none", reason="is not supported") = None  # type: ignore[valid-type]
    verbosity: _neutral("medium", reason="is not supported") = None  # type: ignore[valid-type]
    web_search_options: _neutral(reason="is not supported") = None  # type: ignore[valid-type]

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


AnyBody = CompletionBody | ChatBody
Kind = TypeVar("Kind", bound=Body)


def parse(kind: type[Kind], data: bytes) -> Kind:
    """The body that `data` encodes. Raises: InvalidRequest, which names the first field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False)[0]
        raise InvalidRequest(path_of(first["loc"]) or "body", _problem(first)) from None


def path_of(location: tuple[str | int, ...]) -> str:
    """A place in a body as callers read it: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _problem(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "missing":
            return "must be given"
        case "extra_forbidden":
            return "is not a field that this server knows"
        case "json_invalid":
            return f"is not JSON: {error['ctx']['error']}"
        case "value_error":
            return str(error["ctx"]["error"])
    shown = repr(error["input"])
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{error['msg'].replace('Input should be', 'must be')}, got {shown}"
