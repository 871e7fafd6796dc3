"""`outrider replay`: recompute an output from its receipt, and report whether it is the same.

Knows receipts, requests as callers keep them, and the client. Imports neither Ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from typer import Argument, Option

from core.errors import ConfigError
from deploy.cli import terminal
from deploy.cli.jobs import DEFAULT_GRPC_PORT, MAX_RETRIES, Job, bearer_token
from deploy.receipts import Outcome, Verdict, compare
from outrider_client import Client, GenerateFields, OutriderError, Retry
from protos.outrider.v1 import generation_pb2 as pb

DEFAULT_ADDRESS = f"localhost:{DEFAULT_GRPC_PORT}"
TIMEOUT_S = 600.0
NEEDED = ("target", "sampling", "stopping", "verification", "output_digest", "output_tokens")
"""Fields without which a receipt cannot be compared."""


@dataclass(frozen=True)
class ReplayOptions:
    """Recompute an output from its receipt, and report whether it is the same.

    Exit status: 0 the same, 1 another output, 2 not comparable (the report names the field) or not recomputable.
    """

    receipt: Annotated[
        Path,
        Argument(
            metavar="RECEIPT", help="A file from `generate --save`, or a receipt as JSON, whose prompt is in --request."
        ),
    ]
    request: Annotated[
        Path | None, Option(metavar="FILE", help="The request as JSON, in the form of the proto or of an HTTP body.")
    ] = None
    address: Annotated[
        list[str] | None,
        Option(
            metavar="HOST:PORT", help="Address of a server; may be repeated, and each server recomputes the output."
        ),
    ] = None
    model: Annotated[str | None, Option(metavar="NAME", help="Name of the model; by default that of the receipt.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """An output that a caller has saved."""

    receipt: Mapping[str, Any]
    request: Mapping[str, Any] | None
    token_ids: tuple[int, ...] | None


def replay(options: ReplayOptions) -> int:
    """Returns the exit status, of several servers the worst. Raises: ConfigError for files that cannot be used."""
    kept = read(options.receipt)
    request = _json_of(options.request) if options.request is not None else kept.request
    if request is None:
        raise ConfigError(f"{options.receipt} has no request: give the file with --request FILE")
    prompt, fields = _asked(request, kept.receipt, options.model)
    statuses = []
    for address in options.address or [DEFAULT_ADDRESS]:
        verdict = _replay_at(address, prompt, fields, kept)
        terminal.say(f"{address}: {_WORDS[verdict.outcome]}: {verdict.reason}")
        statuses.append(int(verdict.outcome))
    return max(statuses)


_WORDS = {Outcome.SAME: "same", Outcome.DIFFERS: "differs", Outcome.NOT_COMPARABLE: "not comparable"}


def _replay_at(address: str, prompt: str | None, fields: GenerateFields, kept: Kept) -> Verdict:
    try:
        with Client(address, token=bearer_token(), retry=Retry(max_retries=MAX_RETRIES)) as client:
            completion = client.generate(prompt, **fields)
    except OutriderError as error:
        return Verdict(Outcome.NOT_COMPARABLE, f"it cannot be recomputed: {error}")
    now = completion.finish.receipt
    if now is None:
        return Verdict(Outcome.NOT_COMPARABLE, "the server sent no receipt")
    return compare(kept.receipt, now, kept.token_ids, completion.token_ids)


def save(path: Path, job: Job) -> None:
    """Write the receipt, the request and the tokens. Raises: OSError."""
    source = job.fields.get("source")
    text = job.prompt if job.prompt or source is None else None
    request = pb.GenerateRequest(model=job.fields.get("model") or "", text=text, source=source)
    kept = {
        "receipt": job.finish.receipt,
        "request": MessageToDict(request, preserving_proto_field_name=True),
        "token_ids": list(job.token_ids),
    }
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Kept:
    """Read a file written by `save`, or a receipt alone. Raises: ConfigError."""
    found = _json_of(path)
    receipt = found.get("receipt", found)
    try:
        missing = {*NEEDED} - {*receipt}
        is_whole = not missing and isinstance(receipt["target"], Mapping)
    except TypeError:
        is_whole = False
    if not is_whole:
        raise ConfigError(f"{path} holds no receipt: outrider generate --save FILE writes one")
    tokens = found.get("token_ids")
    return Kept(receipt, found.get("request"), None if tokens is None else tuple(tokens))


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def _asked(
    request: Mapping[str, Any], receipt: Mapping[str, Any], model: str | None
) -> tuple[str | None, GenerateFields]:
    """The prompt and the arguments of a call: the prompt of the request, all parameters of the receipt."""
    prompt, fields = _prompt_of(request)
    sampling = {name: value for name, value in receipt["sampling"].items() if value not in ([], {})}
    if bias := sampling.pop("logit_bias", None):
        fields["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
    for name, value in {**sampling, **receipt["stopping"]}.items():
        fields[name] = value  # type: ignore[literal-required]  # they are named alike in both
    fields["verification"] = receipt["verification"]
    if receipt["verification"] != "coupled" and not receipt.get("depends_on_guesses"):
        fields["max_draft_tokens"] = 0  # the output was made without guesses, and would depend on them
    if "lenience" in receipt:
        fields["lenience"] = receipt["lenience"]
    fields.update({"model": model or receipt.get("model") or None, "receipt": True, "timeout_s": TIMEOUT_S})
    return prompt, fields


def _prompt_of(request: Mapping[str, Any]) -> tuple[str | None, GenerateFields]:
    """The prompt of the request, and its structured output. Raises: ConfigError."""
    body: Any = request.get("prompt", request.get("messages"))
    if body is not None:  # of a call by HTTP
        if request.get("truncate_prompt_tokens") is not None:
            raise ConfigError("the request's prompt was cut: give what was left of it as `prompt` (prompt_token_ids)")
        if "messages" in request:
            return None, _of_chat(request)
        if isinstance(body, list) and body and not isinstance(body[0], int):
            if len(body) > 1:
                raise ConfigError(f"the request has {len(body)} prompts: leave the one that the receipt is of")
            (body,) = body
        fields = _source_of(request)
        if isinstance(body, str):
            return body or (None if fields else body), fields
        fields["token_ids"] = body
        return None, fields
    try:
        message = ParseDict(dict(request), pb.GenerateRequest(), ignore_unknown_fields=True)
    except ParseError as error:
        raise ConfigError(f"the request is not one of outrider.v1: {error}") from error
    return _given_by(message)


def _source_of(body: Mapping[str, Any]) -> GenerateFields:
    """The source of a call by HTTP, which has one name for a text and for token ids."""
    source = body.get("source")
    if source is None:
        return {}
    return {"source": source} if isinstance(source, str) else {"source_token_ids": source}


def _of_chat(body: Mapping[str, Any]) -> GenerateFields:
    """Fields of a chat by HTTP: messages and arguments of its template, as in `deploy.http`, without tools.

    Raises: ConfigError.
    """
    if body.get("continue_final_message"):
        raise ConfigError("a chat with continue_final_message cannot be repeated by gRPC, which has no such field")
    messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in body["messages"]]
    effort = body.get("reasoning_effort")
    asked = {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
    given = asked if effort is not None else {}
    return {"messages": messages, "template_arguments": {**given, **(body.get("chat_template_kwargs") or {})}}


def _given_by(message: pb.GenerateRequest) -> tuple[str | None, GenerateFields]:
    fields: GenerateFields = {}
    kind = message.structured_output.WhichOneof("kind")
    if kind == "choice":
        fields["choice"] = list(message.structured_output.choice.choices)
    elif kind is not None:
        fields[kind] = getattr(message.structured_output, kind)  # type: ignore[literal-required]  # as above
    if message.HasField("source"):
        fields["source"] = message.source
    if message.HasField("source_token_ids"):
        fields["source_token_ids"] = list(message.source_token_ids.ids)
    match message.WhichOneof("prompt"):
        case "text":
            return message.text, fields
        case "token_ids":
            fields["token_ids"] = list(message.token_ids.ids)
        case "chat":
            chat = MessageToDict(message.chat, preserving_proto_field_name=True)
            fields.update(chat)  # type: ignore[typeddict-item]  # they are named alike in both
        case _ if not fields.keys() & {"source", "source_token_ids"}:
            raise ConfigError("the request has no prompt: give text, token_ids or chat")
    return None, fields
