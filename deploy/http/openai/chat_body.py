"""The body of OpenAI's /v1/chat/completions: messages and tools.

Knows the meaning of each field; must not know replies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, model_validator

from core.errors import InvalidRequest
from deploy.api import GivenTool, json_object, template_call
from deploy.http.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    NO_VERBOSITY,
    Chat,
    Content,
    Effort,
    Ignored,
    Part,
    TextContent,
    neutral,
    text_of,
)
from deploy.http.openai.bodies import NO_MODERATION, ROLES, RefusalPart, SampledBody, TextPart
from deploy.http.tools import AUTO, NAMED, AskedTools, asked_tools

NO_FUNCTIONS = "send tools"
NO_AUDIO = "this server writes text alone"
PARTS: Mapping[str, type[TextContent]] = {"text": TextPart}
ASSISTANTS_PARTS: Mapping[str, type[TextContent]] = {**PARTS, "refusal": RefusalPart}


class CalledFunction(Part):
    name: str
    arguments: str


class ChatCall(Part):
    """A tool call by the model in an earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


class Message(Part):
    """A message of the chat. The model's earlier answers are accepted in the form in which they were returned."""

    role: str
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Another name of `reasoning`."""
    tool_calls: Annotated[list[ChatCall] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[Any, neutral([], reason="this server cites nothing")] = None
    audio: Annotated[Any, neutral(reason=NO_AUDIO)] = None
    function_call: Annotated[Any, neutral(reason=NO_FUNCTIONS)] = None

    def for_template(self, field: str) -> dict[str, Any]:
        """The message in the form that chat templates expect. Raises: InvalidRequest."""
        parts = ASSISTANTS_PARTS if self.role == "assistant" else PARTS
        content = text_of(self.content or "", parts, f"{field}.content")
        message: dict[str, Any] = {"role": ROLES.get(self.role, self.role), "content": content}
        message |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        if (thoughts := self._thoughts(field)) is not None:
            message["reasoning_content"] = thoughts
        if self.tool_call_id is not None and self.role != "tool":
            raise InvalidRequest(f"{field}.tool_call_id", "must not be given unless role is tool")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest(f"{field}.tool_calls", "must not be given unless role is assistant")
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(
                    call.id,
                    call.function.name,
                    json_object(call.function.arguments, f"{field}.tool_calls[{index}].function.arguments"),
                )
                for index, call in enumerate(self.tool_calls)
            ]
        return message

    def _thoughts(self, field: str) -> str | None:
        """Raises: InvalidRequest."""
        if len({self.reasoning, self.reasoning_content} - {None}) > 1:
            raise InvalidRequest(f"{field}.reasoning", "must be the same as reasoning_content")
        return self.reasoning if self.reasoning is not None else self.reasoning_content


class GivenFunction(Part):
    """A function that the model may call. A forced call always follows the schema; `strict` is ignored."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Ignored = None


class ChatTool(Part):
    type: Literal["function"]
    function: GivenFunction


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SampledBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    """Whether an answer that continues the chat's last message repeats it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ChatTool] | None, FailFast(), Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Annotated[Any, neutral([], reason=NO_FUNCTIONS)] = None
    function_call: Annotated[Any, neutral("none", "auto", reason=NO_FUNCTIONS)] = None
    modalities: Annotated[Any, neutral(["text"], reason=NO_AUDIO)] = None
    audio: Annotated[Any, neutral(reason=NO_AUDIO)] = None
    prediction: Annotated[Any, neutral(reason="this server drafts by itself")] = None
    reasoning_effort: Effort | None = None
    verbosity: Annotated[Any, neutral("medium", reason=NO_VERBOSITY)] = None
    moderation: Annotated[Any, neutral(reason=NO_MODERATION)] = None
    web_search_options: Annotated[Any, neutral(reason="this server runs no tools of its own")] = None

    @model_validator(mode="after")
    def _fill_max_tokens(self) -> Self:
        """Accept the newer name of the limit, max_completion_tokens."""
        self.max_tokens = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def echoed(self) -> str:
        """The text that the answer repeats, or an empty string. Raises: InvalidRequest."""
        if not self.echo or not self.messages or self.messages[-1].role != "assistant":
            return ""
        return str(self.messages[-1].for_template(f"messages[{len(self.messages) - 1}]")["content"])

    @property
    def chat(self) -> Chat | None:
        return [message.for_template(f"messages[{index}]") for index, message in enumerate(self.messages)]

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        return self.chat_template_kwargs or {}

    @property
    def effort_asked(self) -> tuple[str, str] | None:
        return None if self.reasoning_effort is None else ("reasoning_effort", self.reasoning_effort)

    @property
    def tools_asked(self) -> AskedTools | None:
        functions = [(f"tools[{index}].function", tool.function) for index, tool in enumerate(self.tools or [])]
        given = [GivenTool(field, each.name, each.description, each.parameters) for field, each in functions]
        is_one = self.parallel_tool_calls is False
        choice = self.tool_choice or AUTO
        if isinstance(choice, str):
            return asked_tools(given, choice, is_one=is_one, name_field="tool_choice")
        return asked_tools(given, NAMED, choice.function.name, name_field="tool_choice.function.name")

    def check(self) -> None:
        """Raises: InvalidRequest."""
        super().check()
        self._check_continued()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "must not be given unless logprobs is true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise InvalidRequest(
                "max_completion_tokens", f"must be the same as max_tokens, got {self.max_completion_tokens}"
            )

    def _check_continued(self) -> None:
        """Raises: InvalidRequest."""
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continues:
            needed = "false beside" if self.continues else "true without"
            raise InvalidRequest("add_generation_prompt", f"must be {needed} continue_final_message")
        if self.continues and self.messages and self.messages[-1].tool_calls:
            field = f"messages[{len(self.messages) - 1}].tool_calls"
            raise InvalidRequest(field, "must not be given in a message that is continued")

    def param_of(self, field: str) -> str:
        if field == "logprobs":
            return "top_logprobs"
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().param_of(field)
