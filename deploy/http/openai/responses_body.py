"""The body of /v1/responses, and its items as chat messages.

Knows the meaning of each field; must not know replies. Nothing is stored between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, PlainValidator

from core.errors import InvalidRequest
from deploy.api import GivenTool, json_object, template_call
from deploy.http.bodies import (
    MAX_TOOLS,
    NO_VERBOSITY,
    Chat,
    Content,
    Effort,
    Ignored,
    Part,
    TextContent,
    few,
    neutral,
    part_of,
    strings,
    text_of,
)
from deploy.http.failures import MAX_SHOWN_CHARS
from deploy.http.openai.bodies import NO_MODERATION, ROLES, OpenAiBody, RefusalPart, TextPart, structure_of_format
from deploy.http.tools import AUTO, NAMED, AskedTools, asked_tools
from workers.grammar import Structure

NOT_KEPT = "this server keeps nothing between calls; send what went before as input"
NOT_LATER = "this server answers at once"
LOGPROBS = "message.output_text.logprobs"
NEVER_THERE = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Values of `include` that are accepted without effect: reasoning is always returned in full, and this server never
creates the other items."""
BY_THE_MODEL = "here the model alone calls tools"
NOT_AT_ONCE = "this server waits for no tools"
NO_REFERENCES = "this server keeps no items; clients that send references send the items where store is false"
NO_OTHERS = "this server takes no other items"


def _include(value: Any) -> Any:
    """Accept the values of `include` that have no effect. Raises: ValueError for others."""
    wrong = next((each for each in value or () if each not in NEVER_THERE), None)
    if wrong == LOGPROBS:
        raise ValueError(f"must not have {LOGPROBS}: /v1/chat/completions has log probabilities")
    if wrong is not None:
        raise ValueError(f"must be among {', '.join(NEVER_THERE)}, got {wrong[:MAX_SHOWN_CHARS]!r}")
    return value


class OutputPart(TextPart):
    """Text of an earlier answer, in the form in which it was returned."""

    annotations: Annotated[Any, neutral([], reason="this server cites nothing")] = None
    logprobs: Ignored = None


_PARTS: Mapping[str, type[TextContent]] = {
    "input_text": TextPart,
    "output_text": OutputPart,
    "text": TextPart,
    "refusal": RefusalPart,
}
_RESULTS: Mapping[str, type[TextContent]] = {"input_text": TextPart, "text": TextPart, "output_text": OutputPart}
_SUMMARIES: Mapping[str, type[TextContent]] = {"summary_text": TextPart}
_THOUGHTS: Mapping[str, type[TextContent]] = {"reasoning_text": TextPart, "text": TextPart}


class Item(Part):
    """Base of all items. Items from this server's replies are accepted in the form in which they were returned."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Ignored = None


class CallItem(Item):
    """A tool call by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Annotated[Any, neutral(reason="tools have no namespaces here")] = None
    caller: Annotated[Any, neutral({"type": "direct"}, reason=BY_THE_MODEL)] = None
    is_async: Annotated[Any, neutral(False, reason=NOT_AT_ONCE), Field(alias="async")] = None


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    name: Ignored = None
    namespace: Annotated[Any, neutral(reason="tools have no namespaces here")] = None
    caller: Annotated[Any, neutral({"type": "direct"}, reason=BY_THE_MODEL)] = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: Content = ""
    content: Content | None = None
    encrypted_content: Annotated[Any, neutral("", reason="this server cannot read it")] = None


_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class TextFormat(Part):
    type: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class TextOptions(Part):
    format: TextFormat | None = None
    verbosity: Annotated[Any, neutral("medium", reason=NO_VERBOSITY)] = None


class ReasoningOptions(Part):
    effort: Effort | None = None
    context: Annotated[Any, neutral("auto", reason="the chat template says which thoughts the model sees")] = None
    mode: Annotated[Any, neutral("standard", reason="the model answers once, in one way")] = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: reasoning is returned in full, and summaries are empty."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesTool(Part):
    """A function that the model may call. A forced call always follows the schema; `strict` is ignored."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None
    is_async: Annotated[Any, neutral(False, reason=NOT_AT_ONCE), Field(alias="async")] = None
    allowed_callers: Annotated[Any, neutral(["direct"], reason=BY_THE_MODEL)] = None
    defer_loading: Annotated[Any, neutral(False, reason="this server shows the model all tools")] = None
    output_schema: Annotated[Any, neutral(reason="chat templates show the schema of arguments alone")] = None


class ResponsesChoice(Part):
    type: Literal["function"]
    name: str


class ObfuscationOptions(Part):
    include_obfuscation: Ignored = None


class ResponsesBody(OpenAiBody):
    """The body of /v1/responses."""

    PROMPT: ClassVar[str] = "input"

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(few)]
    instructions: str | None = None
    max_tokens: Annotated[int | None, Field(alias="max_output_tokens")] = None
    stop: Annotated[list[str], PlainValidator(strings)] = Field(default=[])
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ObfuscationOptions | None = None
    store: Annotated[Any, neutral(False, reason=NOT_KEPT)] = None
    previous_response_id: Annotated[Any, neutral(reason=NOT_KEPT)] = None
    conversation: Annotated[Any, neutral(reason=NOT_KEPT)] = None
    prompt: Annotated[Any, neutral(reason=NOT_KEPT)] = None
    background: Annotated[Any, neutral(False, reason=NOT_LATER)] = None
    include: Annotated[list[str] | None, BeforeValidator(few), AfterValidator(_include)] = None
    top_logprobs: Annotated[Any, neutral(0, reason="/v1/chat/completions has it")] = None
    truncation: Annotated[Any, neutral("disabled", reason="what is too long is refused")] = None
    moderation: Annotated[Any, neutral(reason=NO_MODERATION)] = None
    context_management: Annotated[Any, neutral([], reason="what is too long is refused")] = None
    background_options: Annotated[Any, neutral({}, reason=NOT_LATER)] = None
    image: Annotated[Any, neutral(reason="this server writes text alone")] = None
    access_programs: Ignored = None
    max_tool_calls: Annotated[Any, neutral(reason="this server calls no tools of its own")] = None

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def effort_asked(self) -> tuple[str, str] | None:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return None if effort is None else ("reasoning.effort", effort)

    @property
    def format_asked(self) -> tuple[str, Structure] | None:
        given = self.text.format if self.text is not None else None
        if given is None:
            return None
        return structure_of_format("text.format", given.type, given.schema_, "text.format.schema", "text.format.schema")

    @property
    def tools_asked(self) -> AskedTools | None:
        tools = enumerate(self.tools or [])
        given = [GivenTool(f"tools[{index}]", each.name, each.description, each.parameters) for index, each in tools]
        choice = self.tool_choice or AUTO
        is_one = self.parallel_tool_calls is False
        if isinstance(choice, str):
            return asked_tools(given, choice, is_one=is_one, name_field="tool_choice")
        return asked_tools(given, NAMED, choice.name, name_field="tool_choice.name")

    @property
    def chat(self) -> Chat | None:
        messages: Chat = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequest("input", "must hold at least one item")
        for index, item in enumerate(self.input):
            _add(messages, _item(item, f"input[{index}]"), f"input[{index}]")
        return messages


def _item(given: Mapping[str, Any], field: str) -> Item:
    """Parse an item; without a type it is a message. Raises: InvalidRequest."""
    kind = given.get("type")
    reason = NO_REFERENCES if kind == "item_reference" else NO_OTHERS
    return part_of({**given, "type": "message" if kind is None else kind}, _ITEMS, field, reason)


def _add(messages: Chat, item: Item, field: str) -> None:
    """Append an item. Consecutive text, reasoning and calls of an assistant form one message."""
    if isinstance(item, CallOutputItem):
        output = text_of(item.output, _RESULTS, f"{field}.output")
        messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
    elif isinstance(item, CallItem):
        call = template_call(item.call_id, item.name, json_object(item.arguments, f"{field}.arguments"))
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        summary = text_of(item.summary, _SUMMARIES, f"{field}.summary")
        thoughts = text_of(item.content or "", _THOUGHTS, f"{field}.content") or summary
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
    elif isinstance(item, MessageItem):
        last, content = messages[-1] if messages else {}, text_of(item.content, _PARTS, f"{field}.content")
        if item.role == "assistant" and last.get("role") == "assistant" and not last["content"]:
            last["content"] = content
        else:
            messages.append({"role": ROLES.get(item.role, item.role), "content": content})


def _assistant(messages: Chat) -> dict[str, Any]:
    """The last message, if it is the assistant's; else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
