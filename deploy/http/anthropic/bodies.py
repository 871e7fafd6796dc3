"""The bodies of /v1/messages and /v1/messages/count_tokens, and their blocks as chat messages.

Knows the meaning of each field; must not know replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from core.errors import InvalidRequest
from deploy.api import GivenTool, require, template_call
from deploy.http.bodies import (
    EFFORT,
    MAX_MESSAGES,
    MAX_TOOLS,
    TEXT_ALONE,
    Body,
    Chat,
    Content,
    Effort,
    Ignored,
    Part,
    TextContent,
    few,
    neutral,
    part_of,
    text_of,
)
from deploy.http.tools import AUTO, NAMED, NO_CALLS, REQUIRED, AskedTools, asked_tools
from workers.grammar import Structure

CHOICES: Mapping[str, str] = {"auto": AUTO, "any": REQUIRED, "none": NO_CALLS, "tool": NAMED}
EFFORTS = ((5_000, "low"), (10_000, "medium"))
"""(thinking budget in tokens, effort for the chat template below it); larger budgets are "high"."""
NO_TOOLS = "this server runs no tools of its own"
KEPT_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
NO_EDITS = "this server takes nothing out of a prompt"


class ContentBlock(Part):
    cache_control: Ignored = None


class TextBlock(ContentBlock, TextContent):
    citations: Annotated[Any, neutral([], reason="this server cites nothing")] = None


class ToolUseBlock(ContentBlock):
    """A tool call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, neutral({"type": "direct"}, reason=NO_TOOLS)] = None
    toolset_name: Annotated[Any, neutral(reason=NO_TOOLS)] = None


class ToolResultBlock(ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = ""
    is_error: bool | None = None
    """Passed to the chat template, which may use it."""
    toolset_name: Annotated[Any, neutral(reason=NO_TOOLS)] = None

    def for_template(self, field: str) -> dict[str, Any]:
        """The block as a chat message. Raises: InvalidRequest."""
        content = text_of(self.content, _TEXTS, f"{field}.content")
        message = {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}
        return {**message, "is_error": True} if self.is_error else message


class ThinkingBlock(ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


_TEXTS: Mapping[str, type[TextContent]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[ContentBlock]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "tool_use": ToolUseBlock, "thinking": ThinkingBlock},
}
"""Allowed block types by role."""


class MessageParam(Part):
    role: Literal["user", "assistant", "system"]
    content: Content

    def for_template(self, field: str) -> Chat:
        """The message for chat templates; each tool result becomes a message of its own. Raises: InvalidRequest."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        fields = [f"{field}.content[{index}]" for index in range(len(self.content))]
        blocks = [self._block(each, at) for each, at in zip(self.content, fields, strict=True)]
        if self.role == "assistant":
            return _assistant(blocks)
        placed = zip(blocks, fields, strict=True)
        results = [block.for_template(at) for block, at in placed if isinstance(block, ToolResultBlock)]
        said = [block.text for block in blocks if isinstance(block, TextBlock)]
        return [*results, {"role": self.role, "content": "\n".join(said)}] if said or not results else results

    def _block(self, given: Mapping[str, Any], field: str) -> ContentBlock:
        return part_of(given, _BLOCKS[self.role], field, f"{TEXT_ALONE} from the role {self.role}")


def _assistant(blocks: Sequence[ContentBlock]) -> Chat:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    if thoughts := "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        message["reasoning_content"] = thoughts
    if calls := [template_call(each.id, each.name, each.input) for each in blocks if isinstance(each, ToolUseBlock)]:
        message["tool_calls"] = calls
    return [message]


def _custom(value: Any) -> Any:
    if value not in (None, "custom"):
        raise ValueError(f"must be custom: {NO_TOOLS}")
    return value


class MessagesTool(Part):
    type: Annotated[Any, AfterValidator(_custom)] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: Ignored = None
    strict: Ignored = None
    input_examples: Ignored = None
    eager_input_streaming: Ignored = None
    allowed_callers: Annotated[Any, neutral(["direct"], reason=NO_TOOLS)] = None
    defer_loading: Annotated[Any, neutral(False, reason="this server shows the model all tools")] = None


class MessagesChoice(Part):
    """Whether a tool must be called, and which."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    """Whether the model may think before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Passed to the chat template as an effort; it is not enforced."""
    display: Ignored = None

    @property
    def effort(self) -> str | None:
        """The effort for the budget; None without a budget."""
        budget = self.budget_tokens
        if self.type != "enabled" or budget is None:
            return None
        return next((effort for most, effort in EFFORTS if budget < most), "high")


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputOptions(Part):
    format: OutputFormat | None = None
    effort: Effort | None = None


class CountBody(Body):
    """The body of /v1/messages/count_tokens: the fields that make up the prompt."""

    messages: Annotated[list[MessageParam], FailFast(), Field(max_length=MAX_MESSAGES)]
    system: Content | None = None
    tools: Annotated[list[MessagesTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputOptions | None = None
    cache_control: Ignored = None
    context_management: Annotated[Any, neutral({}, {"edits": []}, KEPT_THINKING, reason=NO_EDITS)] = None
    mcp_servers: Annotated[Any, neutral([], reason=NO_TOOLS)] = None
    speed: Annotated[Any, neutral("standard", reason="every request is served as fast as it can be")] = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def continues(self) -> bool:
        """Whether the last message is the assistant's. The answer then continues it."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Variables for the chat template. The effort of a budget is a hint, which the template may ignore."""
        given, known = self.thinking, dict[str, Any]()
        if given is not None and given.type != "adaptive":
            known["enable_thinking"] = given.type == "enabled"
        if given is not None and given.effort is not None and self.effort_asked is None:
            known[EFFORT] = given.effort
        return {**known, **(self.chat_template_kwargs or {})}

    @property
    def effort_asked(self) -> tuple[str, str] | None:
        effort = self.output_config.effort if self.output_config is not None else None
        return None if effort is None else ("output_config.effort", effort)

    @property
    def chat(self) -> Chat | None:
        texts = [] if self.system is None else [text_of(self.system, _TEXTS, "system")]
        return [{"role": "system", "content": text} for text in texts] + [
            each for index, message in enumerate(self.messages) for each in message.for_template(f"messages[{index}]")
        ]

    @property
    def tools_asked(self) -> AskedTools | None:
        tools = enumerate(self.tools or [])
        given = [
            GivenTool(f"tools[{index}]", each.name, each.description, each.input_schema, "input_schema")
            for index, each in tools
        ]
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
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            require(budget is not None and budget >= 1, "thinking.budget_tokens", "at least 1 with this type", budget)
        last = self.messages[-1]
        calls = isinstance(last.content, list) and any(each.get("type") == "tool_use" for each in last.content)
        if self.continues and calls:
            field = f"messages[{len(self.messages) - 1}].content"
            raise InvalidRequest(field, "must not call a tool: the call's result has to follow")


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int
    stop: Annotated[list[str] | None, BeforeValidator(few), Field(alias="stop_sequences")] = None
    metadata: Ignored = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """Both values mean the same here: only `priority` changes the order of requests."""
    inference_geo: Ignored = None
    container: Annotated[Any, neutral(reason=NO_TOOLS)] = None
    diagnostics: Annotated[Any, neutral({}, reason="usage says how much of a prompt was cached")] = None
