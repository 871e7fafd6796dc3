"""For each field of each HTTP body what is sent to see whether it arrives, is ignored, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from deploy.http.bodies import Part
from deploy.http.routes import COMPLETIONS
from tests.deploy.contract.fields import SAMPLING

Fragment = dict[str, Any]
Sent = Fragment | tuple[Fragment, Fragment]
"""Content of a body with the field; and without it, if that is not empty."""

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "x"}


def fields_of(path: str) -> set[str]:
    """Names of all fields of the body, those of objects below it behind a dot."""
    return set(_walk(COMPLETIONS[path].body))


def _walk(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        below = _parts(field.annotation)
        yield from (each for part in below for each in _walk(part, f"{prefix}{field.alias or name}."))
        if not below:
            yield prefix + (field.alias or name)


def _parts(hint: Any) -> list[type[Part]]:
    if isinstance(hint, type) and issubclass(hint, Part):
        return [hint]
    return [part for each in get_args(hint) for part in _parts(each)]


def each(**values: Any) -> dict[str, Sent]:
    """Fields that come alone."""
    return {name: {name: value} for name, value in values.items()}


def below(group: str, **values: Any) -> dict[str, Sent]:
    """Fields of an object that come alone in it."""
    return {f"{group}.{name}": {group: {name: value}} for name, value in values.items()}


def lenient(lenience: float) -> Fragment:
    return {"speculation": {"verification": "lenient_coupled", "lenience": lenience}}


def beams(**fields: Any) -> Fragment:
    return {"use_beam_search": True, **fields}


EVERYWHERE: Mapping[str, Sent] = {
    **each(
        **SAMPLING, stream=True, logit_bias={"9": -1.0}, allowed_token_ids=[7, 9], bad_words=["a"],
        bad_word_ids=[[7, 8]], min_tokens=2, ignore_eos=True, stop_token_ids=[9], include_stop_str_in_output=True,
        timeout_s=60.0, priority=3, guided_json=SCHEMA, guided_regex="a+", guided_choice=["a"],
        guided_grammar='start: "a"',
    ),
    **below("structured_outputs", json=SCHEMA, json_object=True, regex="a+", choice=["a"], grammar='start: "a"'),
    **below(
        "speculation", max_draft_tokens=0, verification="block", policy="static", pipelining=False,
        guessers=["prompt_lookup"], template="a+", draft_temperature=0.5, learning=False,
    ),
    "speculation.lenience": (lenient(0.5), lenient(0.25)),
}  # fmt: skip
REPORTS: Mapping[str, Sent] = {**each(receipt=True), **below("speculation", explain=True, trace=True)}


def schema(**changes: Any) -> Fragment:
    named = {"name": "n", "schema": SCHEMA, **changes}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def streamed(**options: bool) -> tuple[Fragment, Fragment]:
    return {"stream": True, "stream_options": options}, {"stream": True, "stream_options": {}}


def usage_always(**options: bool) -> Fragment:
    return {"stream": True, "stream_options": {"include_usage": True, **options}}


TIER: Mapping[str, Sent] = each(service_tier="flex")
SAMPLED: Mapping[str, Sent] = {
    **EVERYWHERE,
    **TIER,
    **REPORTS,
    **each(
        n=2,
        max_tokens=3,
        stop=["a"],
        return_token_ids=True,
        prompt_logprobs=1,
        truncate_prompt_tokens=1,
        use_beam_search=True,
    ),
    "best_of": (beams(best_of=3), beams(best_of=2)),
    "length_penalty": (beams(length_penalty=0.5), beams()),
    "early_stopping": (beams(early_stopping="never"), beams()),
    "response_format.schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object"}},
    ),
    "stream_options.include_usage": streamed(include_usage=True),
    "stream_options.continuous_usage_stats": (usage_always(continuous_usage_stats=True), usage_always()),
    "response_format.type": {"response_format": {"type": "json_object"}},
    "response_format.json_schema.schema": (schema(), schema(schema={"type": "null"})),
}
IGNORED_EVERYWHERE: Mapping[str, Sent] = each(skip_special_tokens=True)
OPENAI_IGNORED: Mapping[str, Sent] = {**IGNORED_EVERYWHERE, **each(
    user="u", metadata={"a": "b"}, safety_identifier="s", prompt_cache_key="k",
    prompt_cache_retention="24h", prompt_cache_options={},
)}  # fmt: skip
SAMPLED_IGNORED: Mapping[str, Sent] = {
    **OPENAI_IGNORED,
    **each(store=True),
    "stream_options.include_obfuscation": streamed(include_obfuscation=False),
    **{f"response_format.json_schema.{name}": (schema(**{name: value}), schema())
       for name, value in (("name", "m"), ("description", "d"), ("strict", True))},
}  # fmt: skip

TOOL = {"name": "f", "parameters": SCHEMA}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEMPLATED: Mapping[str, Sent] = each(chat_template_kwargs={"flag": "up"})


def said(**changes: Any) -> Fragment:
    return {"messages": [{**USER, **changes}]}


def chat_tool(**changes: Any) -> Fragment:
    return {"tools": [{"type": "function", "function": {**TOOL, **changes}}]}


def assistant(**changes: Any) -> Fragment:
    return {"messages": [USER, {"role": "assistant", "content": "y", **changes}]}


def called(**changes: Any) -> Fragment:
    return assistant(tool_calls=[{**CALL, **changes}])


def function(**changes: Any) -> Fragment:
    return called(function={**CALL["function"], **changes})


def assistant_last(**changes: Any) -> Fragment:
    return {**assistant(), **changes}


NAMED = {"type": "function", "function": {"name": "f"}}
CHAT: Mapping[str, Sent] = {
    **SAMPLED,
    **TEMPLATED,
    **each(max_completion_tokens=3, logprobs=True),
    "echo": ({**assistant(), "echo": True}, assistant()),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True}),
    "messages.role": said(role="system"),
    "messages.content": said(content="y"),
    "messages.name": said(name="Ann"),
    "messages.reasoning": (assistant(reasoning="hm"), assistant()),
    "messages.reasoning_content": (assistant(reasoning_content="hm"), assistant()),
    "continue_final_message": (assistant_last(continue_final_message=True), assistant_last()),
    "messages.tool_call_id": ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, {"messages": [{"role": "tool"}]}),
    "messages.tool_calls.id": (called(), called(id="2")),
    "messages.tool_calls.function.name": (function(), function(name="g")),
    "messages.tool_calls.function.arguments": (function(), function(arguments='{"a": 1}')),
    "tools.function.name": (chat_tool(), chat_tool(name="g")),
    "tools.function.description": (chat_tool(description="d"), chat_tool()),
    "tools.function.parameters": (chat_tool(), chat_tool(parameters={"type": "object"})),
    "tool_choice.function.name": ({**chat_tool(), "tool_choice": NAMED}, chat_tool()),
    "parallel_tool_calls": (
        {**chat_tool(), "tool_choice": "required", "parallel_tool_calls": False},
        {**chat_tool(), "tool_choice": "required"},
    ),
}
CHAT_IGNORED: Mapping[str, Sent] = {
    **SAMPLED_IGNORED,
    "messages.tool_calls.index": (called(index=0), called()),
    "messages.tool_calls.type": (called(), called()),
    "messages.refusal": (assistant(refusal="no"), assistant()),
    **each(add_generation_prompt=True),
    "tools.type": (chat_tool(), chat_tool()),
    "tools.function.strict": (chat_tool(strict=True), chat_tool()),
    "tool_choice.type": ({**chat_tool(), "tool_choice": "auto"}, chat_tool()),
}
CHAT_REFUSED: Mapping[str, Fragment] = {
    **{name: {name: value} for name, value in {
        "functions": [{}], "function_call": {"name": "f"}, "modalities": ["audio"], "audio": {}, "prediction": {},
        "reasoning_effort": "low", "verbosity": "low", "web_search_options": {}, "moderation": {},
    }.items()},
    "messages.annotations": assistant(annotations=[{}]),
    "messages.audio": assistant(audio={"id": "1"}),
    "messages.function_call": assistant(function_call={"name": "f"}),
}  # fmt: skip


def formatted(**changes: Any) -> Fragment:
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, **changes}}}


def response_tool(**changes: Any) -> Fragment:
    return {"tools": [{"type": "function", **TOOL, **changes}]}


RESPONSES: Mapping[str, Sent] = {
    **EVERYWHERE,
    **TIER,
    **TEMPLATED,
    **each(input="y", instructions="be brief", max_output_tokens=3, stop=["a"]),
    "text.format.type": {"text": {"format": {"type": "json_object"}}},
    "text.format.schema": (formatted(), formatted(schema={"type": "null"})),
    "tools.name": (response_tool(), response_tool(name="g")),
    "tools.description": (response_tool(description="d"), response_tool()),
    "tools.parameters": (response_tool(), response_tool(parameters={"type": "object"})),
    "tool_choice.name": ({**response_tool(), "tool_choice": {"type": "function", "name": "f"}}, response_tool()),
    "parallel_tool_calls": (
        {**response_tool(), "tool_choice": "required", "parallel_tool_calls": False},
        {**response_tool(), "tool_choice": "required"},
    ),
}
RESPONSES_IGNORED: Mapping[str, Sent] = {
    **OPENAI_IGNORED,
    **each(access_programs={}),
    **below("stream_options", include_obfuscation=False),
    **{f"text.format.{name}": (formatted(**{name: value}), formatted())
       for name, value in (("name", "m"), ("description", "d"), ("strict", True))},
    "tools.type": (response_tool(), response_tool()),
    "tools.strict": (response_tool(strict=True), response_tool()),
    "tool_choice.type": ({**response_tool(), "tool_choice": "auto"}, response_tool()),
}  # fmt: skip
RESPONSES_REFUSED: Mapping[str, Fragment] = {
    **{name: {name: value} for name, value in {
        "store": True, "previous_response_id": "r", "conversation": "c", "prompt": {}, "background": True,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "truncation": "auto", "max_tool_calls": 2,
        "receipt": True,
        "moderation": {}, "context_management": [{}], "background_options": {"completion_window": "2h"}, "image": {},
    }.items()},
    "text.verbosity": {"text": {"verbosity": "low"}},
    **{f"reasoning.{name}": {"reasoning": {name: "low"}}
       for name in ("effort", "summary", "generate_summary", "context", "mode")},
    "tools.async": response_tool(**{"async": True}),
    **{f"tools.{name}": response_tool(**{name: value})
       for name, value in (("allowed_callers", ["x"]), ("defer_loading", True), ("output_schema", {}))},
    **{f"speculation.{name}": {"speculation": {name: True}} for name in ("explain", "trace")},
}  # fmt: skip


def messages_tool(**changes: Any) -> Fragment:
    return {"tools": [{"name": "f", "input_schema": SCHEMA, **changes}]}


def chosen(kind: str, **fields: Any) -> Fragment:
    return {**messages_tool(), "tool_choice": {"type": kind, **fields}}


MESSAGES: Mapping[str, Sent] = {
    **EVERYWHERE,
    **TEMPLATED,
    **each(system="be brief", max_tokens=3, stop_sequences=["a"]),
    "messages.content": said(content="y"),
    "messages.role": ({"messages": [USER, {"role": "assistant", "content": "x"}, USER]}, {"messages": [USER] * 3}),
    "tools.name": (messages_tool(), messages_tool(name="g")),
    "tools.description": (messages_tool(description="d"), messages_tool()),
    "tools.input_schema": (messages_tool(), messages_tool(input_schema={"type": "object"})),
    "tool_choice.type": (chosen("any"), chosen("auto")),
    "tool_choice.name": (chosen("tool", name="f"), messages_tool()),
    "tool_choice.disable_parallel_tool_use": (chosen("any", disable_parallel_tool_use=True), chosen("any")),
    "thinking.type": {"thinking": {"type": "disabled"}},
    "output_config.format.schema": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
MESSAGES_IGNORED: Mapping[str, Sent] = {
    **IGNORED_EVERYWHERE,
    **each(metadata={"user_id": "u"}, service_tier="auto", inference_geo="x", cache_control={"type": "ephemeral"}),
    "tools.type": (messages_tool(type="custom"), messages_tool()),
    **{f"tools.{name}": (messages_tool(**{name: True}), messages_tool())
       for name in ("cache_control", "strict", "input_examples", "eager_input_streaming")},
    **each(context_management={"edits": []}, mcp_servers=[]),
    "thinking.display": {"thinking": {"type": "adaptive", "display": "omitted"}},
    "thinking.budget_tokens": {"thinking": {"type": "adaptive", "budget_tokens": 1024}},
    "output_config.format.type": ({"output_config": {}}, {}),
}  # fmt: skip
MESSAGES_REFUSED: Mapping[str, Fragment] = {
    "receipt": {"receipt": True},
    "output_config.effort": {"output_config": {"effort": "low"}},
    **{name: {name: value} for name, value in (("container", "c"), ("diagnostics", {"a": "b"}), ("speed", "fast"))},
    **{
        f"tools.{name}": messages_tool(**{name: value})
        for name, value in (("allowed_callers", ["x"]), ("defer_loading", True))
    },
    **{f"speculation.{name}": {"speculation": {name: True}} for name in ("explain", "trace")},
}
COMPLETION: Mapping[str, Sent] = {
    **SAMPLED,
    **each(prompt="see", logprobs=2, echo=True),
}
COMPLETION_REFUSED: Mapping[str, Fragment] = {"suffix": {"suffix": "x"}}

BARE: Mapping[str, Fragment] = {
    "/v1/completions": {"prompt": "say"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 9, "messages": [USER]},
}
ARRIVES: Mapping[str, Mapping[str, Sent]] = dict(zip(BARE, (COMPLETION, CHAT, RESPONSES, MESSAGES), strict=True))
IGNORED: Mapping[str, Mapping[str, Sent]] = dict(
    zip(BARE, (SAMPLED_IGNORED, CHAT_IGNORED, RESPONSES_IGNORED, MESSAGES_IGNORED), strict=True)
)
REFUSED: Mapping[str, Mapping[str, Fragment]] = {
    path: {**refused, "source": {"source": "x"}}  # by this model, which has no encoder
    for path, refused in zip(BARE, (COMPLETION_REFUSED, CHAT_REFUSED, RESPONSES_REFUSED, MESSAGES_REFUSED), strict=True)
}
