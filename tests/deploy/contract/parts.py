"""For each field of the blocks, items and parts of official clients what is sent to see what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from anthropic.types import (
    CacheControlEphemeralParam,
    ContentBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUnionParam,
    ToolUseBlockParam,
)
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types import completion_create_params as completion
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionContentPartRefusalParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat import completion_create_params as chat
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputContentParam,
    ResponseInputItemParam,
    ResponseInputTextParam,
    ResponseOutputRefusalParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
)
from openai.types.responses import (
    ToolParam as ResponsesToolParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import Reasoning

from tests.deploy.contract.bodies import USER, Fragment

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: Mapping[str, Any] = {
    COMPLETIONS: completion.CompletionCreateParamsNonStreaming,
    CHAT: chat.CompletionCreateParamsNonStreaming,
    RESPONSES: ResponseCreateParamsNonStreaming,
    MESSAGES: MessageCreateParamsNonStreaming,
}
AS_HEADERS = {"workspace_id", "user_profile_id"}
"""Arguments of Anthropic's client that are no part of a body."""


def alternatives(hint: Any) -> Iterator[Any]:
    """The types that a hint allows."""
    if get_origin(hint) in (Union, Annotated, Required, NotRequired) or type(hint).__name__ == "UnionType":
        for each in get_args(hint)[: 1 if get_origin(hint) is not Union else None]:
            yield from alternatives(each)
    else:
        yield hint


def types_of(hint: Any) -> list[str]:
    """The values of `type` among the alternatives."""
    hints = [get_type_hints(each).get("type") for each in alternatives(hint) if not isinstance(each, str)]
    return sorted({value for hint in hints for each in alternatives(hint) for value in get_args(each)})


@dataclass(frozen=True)
class Place:
    """Where parts of one kind stand, and what becomes of their fields."""

    path: str
    name: str
    """As refusals have it, without indices."""
    official: Any
    bare: Mapping[str, Any]
    around: Any
    """A function from the part to the fragment of a body."""
    arrives: Mapping[str, Any]
    ignored: Mapping[str, Any]
    refused: Mapping[str, Any]

    def body(self, **changes: Any) -> Fragment:
        fragment: Fragment = self.around({**self.bare, **changes})
        return fragment


def _user(part: Any) -> Fragment:
    return {"messages": [{"role": "user", "content": [part]}]}


def _assistant(part: Any) -> Fragment:
    return {"messages": [USER, {"role": "assistant", "content": [part]}, USER]}


def _items(*items: Any) -> Fragment:
    return {"input": [{"role": "user", "content": "x"}, *items]}


def _input(part: Any) -> Fragment:
    return _items({"role": "user", "content": [part]})


def _output(part: Any) -> Fragment:
    return _items({"role": "assistant", "content": [part]})


CACHED = {"cache_control": CacheControlEphemeralParam(type="ephemeral")}
DIRECT, OTHER = {"type": "direct"}, {"type": "program", "caller_id": "p"}
TEXT = {"type": "text", "text": "t"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
ANSWER = {"type": "function_call_output", "call_id": "1", "output": "x"}
BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
ITEM = {"id": "i", "status": "completed"}
PLACES = [
    Place(MESSAGES, "messages.content", TextBlockParam, TEXT, _user, {"text": "u"}, CACHED, {"citations": [{}]}),
    Place(MESSAGES, "system", TextBlockParam, TEXT, lambda part: {"system": [part]},
          {"text": "u"}, CACHED, {"citations": [{}]}),
    Place(MESSAGES, "messages.content.content", TextBlockParam, TEXT, lambda part: _user({**RESULT, "content": [part]}),
          {"text": "u"}, CACHED, {"citations": [{}]}),
    Place(MESSAGES, "messages.content", ToolUseBlockParam, USE, _assistant,
          {"id": "2", "name": "g", "input": {"a": 1}}, {**CACHED, "caller": DIRECT},
          {"caller": OTHER, "toolset_name": "s"}),
    Place(MESSAGES, "messages.content", ToolResultBlockParam, RESULT, _user,
          {"tool_use_id": "2", "content": "c", "is_error": True}, CACHED, {"toolset_name": "s"}),
    Place(MESSAGES, "messages.content", ThinkingBlockParam, {"type": "thinking", "thinking": "t"}, _assistant,
          {"thinking": "u"}, {"signature": "s"}, {}),
    Place(MESSAGES, "tools", ToolParam, TOOL, lambda tool: {"tools": [tool]},
          {"name": "g", "description": "d", "input_schema": {}},
          {**CACHED, "type": "custom", "strict": True, "input_examples": [], "eager_input_streaming": True,
           "allowed_callers": ["direct"], "defer_loading": False},
          {"type": "bash_20250124", "allowed_callers": ["code_execution_20260120"], "defer_loading": True}),
    Place(CHAT, "messages.content", ChatCompletionContentPartTextParam, TEXT, _user, {"text": "u"}, BREAK, {}),
    Place(CHAT, "messages.content", ChatCompletionContentPartRefusalParam, {"type": "refusal", "refusal": "t"},
          _assistant, {"refusal": "u"}, {}, {}),
    Place(RESPONSES, "input.content", ResponseInputTextParam, {"type": "input_text", "text": "t"}, _input,
          {"text": "u"}, BREAK, {}),
    Place(RESPONSES, "input.content", ResponseOutputTextParam, {"type": "output_text", "text": "t"}, _output,
          {"text": "u"}, {"annotations": [], "logprobs": [{}]}, {"annotations": [{}]}),
    Place(RESPONSES, "input.content", ResponseOutputRefusalParam, {"type": "refusal", "refusal": "t"}, _output,
          {"refusal": "u"}, {}, {}),
    Place(RESPONSES, "input", EasyInputMessageParam, {"role": "user", "content": "x"}, _items,
          {"role": "system", "content": "y"}, {"type": "message", "phase": "final_answer", **ITEM}, {}),
    Place(RESPONSES, "input", ResponseFunctionToolCallParam, CALL, _items,
          {"call_id": "2", "name": "g", "arguments": '{"a": 1}'}, {"caller": DIRECT, "async": False, **ITEM},
          {"caller": OTHER, "async": True, "namespace": "n"}),
    Place(RESPONSES, "input", FunctionCallOutput, ANSWER, _items,
          {"call_id": "2", "output": "y"}, {"caller": DIRECT, "name": "f", **ITEM},
          {"caller": OTHER, "namespace": "n"}),
    Place(RESPONSES, "input", ResponseReasoningItemParam, {"type": "reasoning", "summary": []}, _items,
          {"summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "reasoning_text", "text": "c"}]},
          ITEM, {"encrypted_content": "e"}),
    Place(RESPONSES, "tools", FunctionToolParam, {"type": "function", "name": "f"}, lambda tool: {"tools": [tool]},
          {"name": "g", "description": "d", "parameters": {"type": "object"}},
          {"strict": True, "async": False, "allowed_callers": ["direct"], "defer_loading": False},
          {"async": True, "allowed_callers": ["programmatic"], "defer_loading": True, "output_schema": {}}),
    Place(RESPONSES, "reasoning", Reasoning, {}, lambda options: {"reasoning": options}, {"effort": "none"},
          {"context": "auto", "mode": "standard", "summary": "auto", "generate_summary": "concise"},
          {"effort": "low", "context": "all_turns", "mode": "pro"}),
]  # fmt: skip

KINDS: list[tuple[str, str, Any, Any, set[str]]] = [
    (MESSAGES, "messages[0].content[0].type", ContentBlockParam, _user, {"text", "tool_result"}),
    (MESSAGES, "messages[1].content[0].type", ContentBlockParam, _assistant, {"text", "tool_use", "thinking"}),
    (MESSAGES, "tools[0].type", ToolUnionParam, lambda tool: {"tools": [tool]}, {"custom"}),
    (CHAT, "messages[0].content[0].type", ChatCompletionContentPartParam, _user, {"text"}),
    (CHAT, "tools[0].type", ChatCompletionToolUnionParam, lambda tool: {"tools": [tool]}, {"function"}),
    (RESPONSES, "input[1].content[0].type", ResponseInputContentParam, _input, {"input_text"}),
    (RESPONSES, "input[1].type", ResponseInputItemParam, _items,
     {"message", "function_call", "function_call_output", "reasoning"}),
    (RESPONSES, "tools[0].type", ResponsesToolParam, lambda tool: {"tools": [tool]}, {"function"}),
]  # fmt: skip
"""Where parts of several kinds stand: the field that names the kind, all kinds of the client, and those taken here."""
