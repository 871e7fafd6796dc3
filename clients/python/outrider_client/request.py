"""Builds the request message from the caller's arguments. Arguments that are None or absent are not sent.

Knows names and types of fields; the server checks values.
"""

from __future__ import annotations

import json
import math
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import grpc
from google.protobuf.message import Message

from outrider_client._proto import generation_pb2 as pb
from outrider_client._proto.parameters import Parameters
from outrider_client.errors import InvalidRequest
from outrider_client.records import ServiceTier, Verification

SEED_BITS = 53
"""Bits of a seed drawn by the client. JSON in JavaScript keeps integers of this size."""


class GenerateFields(Parameters, total=False):
    """The keyword arguments of `generate` and `stream`. None is the same as not given: the server's default applies.

    Without a `seed` the client draws one, so that a stream can be resumed before its first token.
    """

    token_ids: Sequence[int] | None
    """A prompt of token ids, instead of a text."""
    source: str | None
    """Text for an encoder-decoder's encoder. The prompt then begins the decoder's text, and may be missing.
    Without a source the prompt is the source."""
    source_token_ids: Sequence[int] | None
    """The source as token ids, instead of a text."""
    messages: Sequence[Mapping[str, Any]] | None
    """A chat, instead of a text. Each message has `role` and `content`, and may have `name`. An assistant's message may
    have `tool_calls`, each with `id`, `name` and `arguments`; a tool's message has the `tool_call_id` that it
    answers."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools that the model may call in a chat. Each has `name` and may have `description` and `parameters`, a JSON
    schema. The model's calls are part of the output text."""
    template_arguments: str | Mapping[str, Any] | None
    """Further variables of the chat template."""
    model: str | None
    request_id: str | None
    """Name of the request in the server's logs. Generated if not given."""
    timeout_s: float | None
    """Seconds for the whole stream, retries and pauses between them included."""
    logprobs: int | None
    """Alternatives to report with each token; 0 reports the token alone."""
    prompt_logprobs: int | None
    """Alternatives to report with each prompt token but the first; 0 reports the token alone."""
    resume_token_ids: Sequence[int] | None
    """Output that the caller already has from an earlier stream; only the rest is sent. Needs that stream's seed."""
    priority: int | None
    """Order in the admission queue: lower numbers go first. 0 when not given."""
    service_tier: ServiceTier | None
    """Named priority, instead of `priority`. The caller's key limits which are allowed."""
    n: int | None
    """Number of samples of the prompt. Sample i depends on the seed and i alone."""
    resume_samples: Sequence[Sequence[int]] | None
    """Output that the caller already has, for each of `n` samples, like `resume_token_ids`."""

    stop: str | Sequence[str] | None

    json_schema: str | Mapping[str, Any] | None
    """JSON schema that the whole output must match. At most one of this and the next four may be given."""
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    """In Lark's notation; the start symbol is `start`."""

    verification: Verification | None
    """How guesses are checked. A stream with a relaxed rule (`lenient_coupled`, `lenient_rejection`, `typical`) is not
    resumed when it breaks after its first chunk: the error is raised."""
    early_stopping: Literal["when_full", "never"] | None
    """When a beam search ends: once as many outputs have ended as there are beams. With "never" it then goes on while
    any length could make a beam score higher than one of them; unset, while the best beam does at its present
    length."""
    receipt: bool | None
    """Add a receipt to the last chunk: everything that determined the output."""


def _put_chat(message: pb.GenerateRequest, messages: Sequence[Mapping[str, Any]]) -> None:
    message.chat.messages.extend(_chat_message(entry) for entry in messages)


def _chat_message(entry: Mapping[str, Any]) -> pb.ChatMessage:
    calls = [pb.ToolCall(**_in_json(call, "arguments")) for call in entry.get("tool_calls") or ()]
    return pb.ChatMessage(**{**entry, "tool_calls": calls})


def _put_tools(message: pb.GenerateRequest, tools: Sequence[Mapping[str, Any]]) -> None:
    message.chat.tools.extend(pb.Tool(**_in_json(tool, "parameters")) for tool in tools)


def _put_template_arguments(message: pb.GenerateRequest, arguments: str | Mapping[str, Any]) -> None:
    message.chat.template_arguments = _json_text(arguments)


def _in_json(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of the fields with `name` as JSON text."""
    return {**fields, name: _json_text(fields[name])} if name in fields else {**fields}


def _json_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _put_token_ids(message: pb.GenerateRequest, token_ids: Sequence[int]) -> None:
    message.token_ids.SetInParent()  # sends an empty prompt, too, so that the server's error names it
    message.token_ids.ids.extend(token_ids)


def _put_source_token_ids(message: pb.GenerateRequest, token_ids: Sequence[int]) -> None:
    message.source_token_ids.SetInParent()
    message.source_token_ids.ids.extend(token_ids)


def _put_stop(message: pb.GenerateRequest, stop: str | Sequence[str]) -> None:
    message.stopping.stop.extend([stop] if isinstance(stop, str) else stop)


def _put_json_schema(message: pb.GenerateRequest, schema: str | Mapping[str, Any]) -> None:
    message.structured_output.json_schema = _json_text(schema)


def _put_choice(message: pb.GenerateRequest, choices: Sequence[str]) -> None:
    message.structured_output.choice.SetInParent()  # sends an empty list, too, so that the server refuses it
    message.structured_output.choice.choices.extend([choices] if isinstance(choices, str) else choices)


_STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")
_GROUPS = ("sampling", "stopping", "speculation", "structured_output", "beams")
"""Messages inside the request whose fields are arguments."""
_UNSET = pb.GenerateRequest()
_PATHS = {
    **{name: name for name in _UNSET.DESCRIPTOR.fields_by_name if name not in ("chat", *_GROUPS)},
    **{name: f"{group}.{name}" for group in _GROUPS for name in getattr(_UNSET, group).DESCRIPTOR.fields_by_name},
    "token_ids": "token_ids.ids",
    "source_token_ids": "source_token_ids.ids",
    "messages": "chat.messages",
    "tools": "chat.tools",
    "template_arguments": "chat.template_arguments",
    "resume_samples": "resume_samples.ids",
    "bad_word_ids": "sampling.bad_word_ids.ids",
    "choice": "structured_output.choice.choices",
}
"""Path of each argument in the message. Errors name arguments by their path, like the server's."""
_SPECIAL: dict[str, Callable[[pb.GenerateRequest, Any], None]] = {
    "messages": _put_chat,
    "tools": _put_tools,
    "template_arguments": _put_template_arguments,
    "token_ids": _put_token_ids,
    "source_token_ids": _put_source_token_ids,
    "stop": _put_stop,
    "json_schema": _put_json_schema,
    "choice": _put_choice,
}
_PROMPTS = ("text", "token_ids", "messages")


def to_message(prompt: str | None, fields: Mapping[str, Any]) -> pb.GenerateRequest:
    """The request, with a seed and an id, so that sending it again gives the same output.

    Raises: TypeError for an unknown argument, InvalidRequest for a value of the wrong type.
    """
    given = {name: value for name, value in {"text": prompt, **fields}.items() if value is not None}
    if unknown := fields.keys() - _PATHS.keys() | fields.keys() & {"text"}:
        raise TypeError(f"there is no argument {min(unknown)!r}")
    has_source = "source" in given or "source_token_ids" in given
    if sum(name in given for name in _PROMPTS) not in ((0, 1) if has_source else (1,)):
        raise _invalid("prompt", "exactly one of prompt, token_ids and messages must be given")
    if "messages" not in given and (lonely := [name for name in ("tools", "template_arguments") if name in given]):
        raise _invalid(_PATHS[lonely[0]], "must not be given without messages")
    if sum(name in given for name in _STRUCTURES) > 1:
        raise _invalid("structured_output", f"at most one of {', '.join(_STRUCTURES)} may be given")
    message = pb.GenerateRequest()
    for name, value in given.items():
        _put(message, name, value)
    if message.HasField("timeout_s") and not (math.isfinite(message.timeout_s) and message.timeout_s > 0):
        raise _invalid("timeout_s", f"must be a positive number of seconds, got {message.timeout_s!r}")
    _make_repeatable(message)
    return message


def _make_repeatable(message: pb.GenerateRequest) -> None:
    message.request_id = message.request_id or uuid.uuid4().hex
    # Resumed output needs its original seed; a new one would change the continuation.
    if not message.sampling.HasField("seed") and not (message.resume_token_ids or message.resume_samples):
        message.sampling.seed = secrets.randbits(SEED_BITS)


def _put(message: pb.GenerateRequest, name: str, value: Any) -> None:
    try:
        if name in _SPECIAL:
            _SPECIAL[name](message, value)
        else:
            group = _PATHS[name].partition(".")[0]
            _assign(getattr(message, group) if group in _GROUPS else message, name, value)
    except (AttributeError, TypeError, ValueError) as error:  # protobuf raises any of them for a wrong type
        raise _invalid(_PATHS[name], str(error)) from None


def _assign(owner: Message, name: str, value: Any) -> None:
    field = owner.DESCRIPTOR.fields_by_name[name]
    if field.enum_type is not None:
        setattr(owner, name, _number(field.enum_type, value))
    elif field.message_type is pb.TokenIds.DESCRIPTOR:
        getattr(owner, name).extend(pb.TokenIds(ids=ids) for ids in value)
    elif isinstance(value, Mapping):
        getattr(owner, name).update(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        getattr(owner, name).extend(value)
    else:
        setattr(owner, name, value)


def _number(enum: Any, name: str) -> int:
    """The number of an enum's value. Raises: ValueError for an unknown name."""
    unset, *values = enum.values
    prefix = unset.name.removesuffix("UNSPECIFIED")
    numbers: dict[str, int] = {each.name.removeprefix(prefix).lower(): each.number for each in values}
    if name not in numbers:
        raise ValueError(f"must be one of {', '.join(numbers)}, got {name!r}")
    return numbers[name]


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {problem}", field)
