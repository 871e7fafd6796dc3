"""Base classes for the bodies of all APIs.

Types are checked here, and each refusal names the field by its path in the body. Ranges are checked in `deploy.api`,
for gRPC and HTTP alike. null means the same as a missing field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
)

from core.errors import InvalidRequest
from core.records import SamplingFields, SpeculationFields
from deploy.api import GivenBeams, ServiceTier
from deploy.http.failures import refusal_of
from deploy.http.tools import AskedTools
from workers.grammar import Structure

MAX_MESSAGES = 4096
MAX_ENTRIES = 4096
"""Most entries of a list or object. pydantic creates an object for each wrong entry, which blocks the event loop."""
MAX_TOOLS = 256

TEXT_ALONE = "this server takes text alone"
NO_VERBOSITY = "say in the messages how long an answer should be"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Amount of reasoning before the answer. The model's chat template decides what a value means."""

EFFORT = "reasoning_effort"
"""Name of the effort in chat templates, including gpt-oss's."""

Chat = list[dict[str, Any]]
"""Messages in the form that chat templates expect."""


def few(value: Any) -> Any:
    """Raises: ValueError if a list or an object has too many entries."""
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ValueError(f"must have at most {MAX_ENTRIES} entries, got {len(value)}")
    return value


def strings(value: Any) -> list[str]:
    """A list of strings, given as one string or several. Raises: ValueError."""
    given = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(given, list) and all(isinstance(each, str) for each in given):
        return given
    raise ValueError("must be a string or a list of strings")


def neutral(*allowed: Any, reason: str) -> AfterValidator:
    """Validator of an unsupported field. It accepts only values that change nothing."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError(f"is not supported: {reason}")
        return value

    return AfterValidator(check)


Ignored = Annotated[Any, Field(default=None)]
"""A hint for other servers. It changes no output."""


AnyPart = TypeVar("AnyPart", bound="Part")


class Part(BaseModel):
    """Base of all parts of a body. Refuses unknown fields and wrong types."""

    model_config = ConfigDict(strict=True, extra="forbid")


def _part_with(record: type) -> type[Part]:
    """A part with the fields of a dataclass, all of which may be missing."""
    known: dict[str, Any] = {name: (hint, None) for name, hint in get_type_hints(record).items()}
    return create_model(record.__name__, __base__=Part, **known)


if TYPE_CHECKING:  # pydantic creates these dynamically, which mypy does not follow
    SamplingPart: TypeAlias = Part
    SpeculationPart: TypeAlias = Part
else:
    SamplingPart, SpeculationPart = _part_with(SamplingFields), _part_with(SpeculationFields)


class TextContent(Part):
    """Part of a message's content that has text."""

    type: str
    text: str


Content = Annotated[str | list[dict[str, Any]], BeforeValidator(few)]
"""Text, or parts, which `text_of` joins."""


def part_of(
    given: Mapping[str, Any], kinds: Mapping[str, type[AnyPart]], field: str, reason: str = TEXT_ALONE
) -> AnyPart:
    """The part at `field`, parsed by its type. Raises: InvalidRequest."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(f"{field}.type", f"must be one of {', '.join(kinds)}: {reason}")
    try:
        return kinds[kind].model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refusal_of(error, field) from None


def text_of(content: str | Sequence[Mapping[str, Any]], kinds: Mapping[str, type[TextContent]], field: str) -> str:
    """The text of the content at `field`. Raises: InvalidRequest."""
    if isinstance(content, str):
        return content
    return "\n".join(part_of(each, kinds, f"{field}[{index}]").text for index, each in enumerate(content))


class Speculation(SpeculationPart):
    """The proto's SpeculationParams."""

    verification: str | None = None
    policy: str | None = None
    guessers: Annotated[list[str] | None, BeforeValidator(few)] = None
    template: str | None = None
    explain: bool | None = None
    trace: bool | None = None
    learning: bool | None = None


_Choice = Annotated[list[str] | None, BeforeValidator(few)]


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: _Choice = None
    grammar: str | None = None


class Body(SamplingPart):
    """Fields and properties shared by the bodies of all APIs."""

    HAS_CHOICES: ClassVar[bool] = False
    """Whether replies have OpenAI's choices, which carry receipts, traces and explanations."""

    model: str | None = None
    stream: bool | None = None

    # This project's own fields, by the names of the proto and of vLLM.
    source: Annotated[str | list[int] | None, BeforeValidator(few)] = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(few)] = None
    allowed_token_ids: Annotated[list[int] | None, FailFast(), BeforeValidator(few)] = None
    bad_words: Annotated[list[str] | None, FailFast(), BeforeValidator(few)] = None
    bad_word_ids: Annotated[list[list[int]] | None, FailFast(), BeforeValidator(few)] = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(few)] = None
    include_stop: Annotated[bool | None, Field(alias="include_stop_str_in_output")] = None
    speculation: Speculation | None = None
    timeout_s: float | None = None
    priority: int | None = None
    receipt: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Choice = None
    guided_grammar: str | None = None
    skip_special_tokens: Annotated[Any, neutral(True, reason="special tokens have no text here")] = None

    PROMPT: ClassVar[str] = "messages"
    """Name of the field with the prompt."""

    @property
    def tier_asked(self) -> ServiceTier | None:
        return None

    @property
    def prompts_given(self) -> Sequence[str | list[int]]:
        """The prompts; empty for a chat."""
        return ()

    @property
    def chat(self) -> Chat | None:
        """The prompt as a chat; None if it is not one. Raises: InvalidRequest."""
        return None

    @property
    def continues(self) -> bool:
        """Whether the output continues the chat's last message."""
        return False

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        return {}

    @property
    def effort_asked(self) -> tuple[str, str] | None:
        """The name and the value of the field for reasoning effort; None if it is unset."""
        return None

    @property
    def tools_asked(self) -> AskedTools | None:
        """The tools that may be called; None if none may. Raises: InvalidRequest."""
        return None

    @property
    def format_asked(self) -> tuple[str, Structure] | None:
        """The field of the API's own output format, and its structure; None if it is unset. Raises: InvalidRequest."""
        return None

    @property
    def beams_asked(self) -> GivenBeams | None:
        """The fields of a beam search; None if none is asked for."""
        return None

    @property
    def num_samples(self) -> int | None:
        """Number of samples of each prompt; None for one."""
        return None

    @property
    def ranks_samples(self) -> bool:
        """Whether only the samples with the largest mean log probability are returned."""
        return False

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report with each token; None reports no log probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return None

    def check(self) -> None:
        """Raises: InvalidRequest if fields contradict each other."""

    def param_of(self, field: str) -> str:
        """The body's name of a field that has the proto's name."""
        name, bracket, rest = field.partition("[")
        known = type(self).model_fields.get(name)
        if name == "bad_words" and self.bad_words is None:
            name = "bad_word_ids"
        own = self.PROMPT if name == "prompt" else known.alias if known is not None else None
        return (own or name) + bracket + rest
