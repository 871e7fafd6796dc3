"""The body of /v1/responses: what it says, and its items as messages of a chat.

Knows what each field says; must not know how it is replied to. Nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, PlainValidator, ValidationError

from core.errors import InvalidRequest
from deploy.api import GivenTool, json_object, template_call
from deploy.http.bodies import (
    MAX_TOOLS,
    TEXT_ALONE,
    Chat,
    Ignored,
    Part,
    few,
    neutral,
    refusal_of,
    strings,
)
from deploy.http.openai.bodies import OpenAiBody, structure_of_format
from deploy.http.tools import AUTO, NAMED, AskedTools, asked_tools
from workers.grammar import Structure

NOT_KEPT = "is not supported: this server keeps nothing between calls; send what went before as input"
NOT_LATER = "is not supported: this server answers at once"
NOT_SHOWN = "is not supported: this server has nothing of the kind to include"
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = {"developer": "system"}
"""What chat templates call a role that they have no word for."""


def _parts(value: Any) -> Any:
    """Text, or the texts of parts."""
    return "\n".join(map(_part, value)) if isinstance(value, list) else value


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        refusal: str = part["refusal"]
        return refusal
    raise ValueError('must be a string or a list of {"type": "input_text", "text": ...}: ' + TEXT_ALONE)


_Text = Annotated[str, BeforeValidator(_parts)]


class Item(Part):
    """What all items have in common: what came from this server may come back as it was."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(Item):
    """Something said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text
    phase: Ignored = None


class CallItem(Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: neutral(reason="is not supported") = None  # type: ignore[valid-type]


class CallOutputItem(Item):
    """What the call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text


class ReasoningItem(Item):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: Annotated[str, BeforeValidator(_parts)] = ""
    content: Annotated[str | None, BeforeValidator(_parts)] = None
    encrypted_content: neutral(reason="is not supported: this server encrypts nothing") = None  # type: ignore[valid-type]


_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class TextFormat(Part):
    """What the text must look like."""

    type: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class TextOptions(Part):
    """Of the text that is asked for."""

    format: TextFormat | None = None
    verbosity: neutral("medium", reason="is not supported") = None  # type: ignore[valid-type]


class ReasoningOptions(Part):
    """Of what the model thinks before it answers."""

    effort: neutral("none", reason="is not supported: the model thinks as its chat template has it") = None  # type: ignore[valid-type]
    summary: neutral(reason="is not supported: what the model thinks is given as it is") = None  # type: ignore[valid-type]
    generate_summary: neutral(reason="is not supported: what the model thinks is given as it is") = None  # type: ignore[valid-type]


class ResponsesTool(Part):
    """A function. Arguments keep to the schema where a call is asked for, `strict` or not."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None


class ResponsesChoice(Part):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class ObfuscationOptions(Part):
    """Of a stream."""

    include_obfuscation: Ignored = None


class ResponsesBody(OpenAiBody):
    """/v1/responses"""

    MAX_TOKENS: ClassVar[str] = "max_output_tokens"
    PROMPT: ClassVar[str] = "input"

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(few)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stop: Annotated[list[str], PlainValidator(strings)] = Field(default=[])
    text: TextOptions | None = None
    tools: Annotated[list[ResponsesTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ObfuscationOptions | None = None
    store: neutral(False, reason=NOT_KEPT) = None  # type: ignore[valid-type]
    previous_response_id: neutral(reason=NOT_KEPT) = None  # type: ignore[valid-type]
    conversation: neutral(reason=NOT_KEPT) = None  # type: ignore[valid-type]
    prompt: neutral(reason=NOT_KEPT) = None  # type: ignore[valid-type]
    background: neutral(False, reason=NOT_LATER) = None  # type: ignore[valid-type]
    include: neutral([], reason=NOT_SHOWN) = None  # type: ignore[valid-type]
    top_logprobs: neutral(0, reason="is not supported here: /v1/chat/completions has it") = None  # type: ignore[valid-type]
    truncation: neutral("disabled", reason="is not supported: what is too long is refused") = None  # type: ignore[valid-type]
    max_tool_calls: neutral(reason="is not supported: this server calls no tools of its own") = None  # type: ignore[valid-type]

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        return self.chat_template_kwargs or {}

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
    """Raises: InvalidRequest."""
    kind = given.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequest(f"{field}.type", f"must be one of {', '.join(_ITEMS)}: this server takes no other items")
    try:
        return _ITEMS[kind].model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refusal_of(error, field) from None


def _add(messages: Chat, item: Item, field: str) -> None:
    """One item after the messages before. What an assistant says, thinks and calls in a row is one message."""
    if isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
    elif isinstance(item, CallItem):
        call = template_call(item.call_id, item.name, json_object(item.arguments, f"{field}.arguments"))
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        messages.append({"role": "assistant", "content": "", "reasoning_content": item.content or item.summary})
    elif isinstance(item, MessageItem):
        last = messages[-1] if messages else {}
        if item.role == "assistant" and last.get("role") == "assistant" and not last["content"]:
            last["content"] = item.content
        else:
            messages.append({"role": ROLES.get(item.role, item.role), "content": item.content})


def _assistant(messages: Chat) -> dict[str, Any]:
    """The last message, which is the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]
