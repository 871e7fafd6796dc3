"""The bodies of /v1/messages and of its count of tokens: what they say, and their blocks as messages of a chat.

Knows what each field says; must not know how it is replied to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError

from core.errors import InvalidRequest
from deploy.api import GivenTool, template_call
from deploy.http.bodies import MAX_MESSAGES, MAX_TOOLS, TEXT_ALONE, Body, Chat, Ignored, Part, few, neutral, refusal_of
from deploy.http.tools import AUTO, NAMED, NO_CALLS, REQUIRED, AskedTools, asked_tools
from workers.grammar import Structure

CHOICES: Mapping[str, str] = {"auto": AUTO, "any": REQUIRED, "none": NO_CALLS, "tool": NAMED}
NO_BUDGET = (
    "must be disabled or adaptive: this server holds no thinking to a budget; a model whose chat template has it thinks"
)


def _texts(value: Any) -> Any:
    """Text, or the texts of blocks."""
    return "\n".join(map(_text, value)) if isinstance(value, list) else value


def _text(block: Any) -> str:
    if isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str):
        text: str = block["text"]
        return text
    raise ValueError('must be a string or a list of {"type": "text", "text": ...}: ' + TEXT_ALONE)


_Text = Annotated[str, BeforeValidator(_texts)]


class ContentBlock(Part):
    """What all blocks have in common."""

    cache_control: Ignored = None


class TextBlock(ContentBlock):
    """Something said."""

    type: Literal["text"]
    text: str
    citations: neutral([], reason="is not supported") = None  # type: ignore[valid-type]


class ToolUseBlock(ContentBlock):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None


class ToolResultBlock(ContentBlock):
    """What the call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: _Text = ""
    is_error: bool | None = None


class ThinkingBlock(ContentBlock):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


_BLOCKS: Mapping[str, Mapping[str, type[ContentBlock]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "tool_use": ToolUseBlock, "thinking": ThinkingBlock},
}
"""Who may say what."""


class MessageParam(Part):
    """Of a chat."""

    role: Literal["user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], BeforeValidator(few)]

    def for_template(self, field: str) -> Chat:
        """As chat templates have it, results of tools as messages of their own. Raises: InvalidRequest."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [_block(each, self.role, f"{field}.content[{i}]") for i, each in enumerate(self.content)]
        return _assistant(blocks) if self.role == "assistant" else _user(blocks)


def _block(given: Mapping[str, Any], role: str, field: str) -> ContentBlock:
    kinds = _BLOCKS[role]
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(f"{field}.type", f"must be one of {', '.join(kinds)} of the role {role}: {TEXT_ALONE}")
    try:
        return kinds[kind].model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refusal_of(error, field) from None


def _user(blocks: Sequence[ContentBlock]) -> Chat:
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    messages: Chat = [{"role": "tool", "content": each.content, "tool_call_id": each.tool_use_id} for each in results]
    said = [block.text for block in blocks if isinstance(block, TextBlock)]
    return [*messages, {"role": "user", "content": "\n".join(said)}] if said or not results else messages


def _assistant(blocks: Sequence[ContentBlock]) -> Chat:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    if thoughts := "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thoughts
    if calls := [template_call(each.id, each.name, each.input) for each in blocks if isinstance(each, ToolUseBlock)]:
        message["tool_calls"] = calls
    return [message]


class MessagesTool(Part):
    """A tool of the caller's."""

    name: str
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Ignored = None
    strict: Ignored = None
    input_examples: Ignored = None
    eager_input_streaming: Ignored = None


class MessagesChoice(Part):
    """Whether a tool has to be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model may think before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Ignored = None


class OutputFormat(Part):
    """A schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputOptions(Part):
    """What the text must look like."""

    format: OutputFormat | None = None
    effort: neutral(reason="is not supported") = None  # type: ignore[valid-type]


class MessagesParts(Body):
    """What a message and its count have in common."""

    messages: Annotated[list[MessageParam], FailFast(), Field(max_length=MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(_texts)] = None
    tools: Annotated[list[MessagesTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputOptions | None = None
    cache_control: Ignored = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """`enable_thinking` is how chat templates call it."""
        is_off = self.thinking is not None and self.thinking.type == "disabled"
        return {**({"enable_thinking": False} if is_off else {}), **(self.chat_template_kwargs or {})}

    @property
    def chat(self) -> Chat | None:
        system: Chat = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [
            each for index, message in enumerate(self.messages) for each in message.for_template(f"messages[{index}]")
        ]

    @property
    def tools_asked(self) -> AskedTools | None:
        tools = enumerate(self.tools or [])
        given = [GivenTool(f"tools[{index}]", each.name, each.description, each.input_schema) for index, each in tools]
        choice = self.tool_choice or MessagesChoice(type="auto")
        if choice.type == "tool" and choice.name is None:
            raise InvalidRequest("tool_choice.name", "must be given with this type")
        is_one = bool(choice.disable_parallel_tool_use)
        return asked_tools(given, CHOICES[choice.type], choice.name, is_one=is_one, name_field="tool_choice.name")

    @property
    def format_asked(self) -> tuple[str, Structure] | None:
        given = self.output_config.format if self.output_config is not None else None
        return None if given is None else ("output_config.format.schema", Structure("json_schema", given.schema_))

    def check(self) -> None:
        """Raises: InvalidRequest."""
        if not self.messages:
            raise InvalidRequest("messages", "must hold at least one message")
        last = len(self.messages) - 1
        if self.messages[last].role == "assistant":
            raise InvalidRequest(f"messages[{last}].role", "must be user: this server does not go on with an answer")
        if self.thinking is not None and self.thinking.type == "enabled":
            raise InvalidRequest("thinking.type", NO_BUDGET)


class CountBody(MessagesParts):
    """/v1/messages/count_tokens"""


class MessagesBody(MessagesParts):
    """/v1/messages"""

    STOP: ClassVar[str] = "stop_sequences"

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, BeforeValidator(few)] = None
    metadata: Ignored = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Both are the same here: only `priority` goes before others."""
    inference_geo: Ignored = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop_sequences or ()
