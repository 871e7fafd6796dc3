"""The paths of the HTTP API, with their body and reply types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deploy.http.anthropic import MessagesBody, MessagesReply
from deploy.http.bodies import Body
from deploy.http.failures import MESSAGES
from deploy.http.openai import ChatBody, ChatReply, CompletionBody, CompletionReply, ResponsesBody, ResponsesReply
from deploy.http.reply import Reply, ReplyOrder


@dataclass(frozen=True, slots=True)
class Route:
    body: type[Body]
    reply: Callable[[ReplyOrder], Reply]


HEALTH = "/health"
METRICS = "/metrics"
MODELS = "/v1/models"
STATUS = "/v1/outrider/status"
PAGE = "/"
RESPONSES = "/v1/responses"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
COMPLETIONS: Mapping[str, Route] = {
    "/v1/completions": Route(CompletionBody, CompletionReply),
    "/v1/chat/completions": Route(ChatBody, ChatReply),
    RESPONSES: Route(ResponsesBody, ResponsesReply),
    MESSAGES: Route(MessagesBody, MessagesReply),
}
"""Paths that count as completions in admission."""
REFUSED: Mapping[str, str] = {
    "/v1/embeddings": "this server generates text; it makes no embeddings",
    "/v1/images": "this server writes text alone",
    "/v1/audio": "this server reads and writes text alone",
    "/v1/moderations": "this server generates text; it judges none",
    "/v1/files": "this server keeps no files",
    "/tokenize": "tokens are told by gRPC: Tokenize and Detokenize",
    "/detokenize": "tokens are told by gRPC: Tokenize and Detokenize",
    f"{RESPONSES}/": "this server keeps no responses: send what went before as input",
    "/v1/conversations": "this server keeps no conversations: send what went before as input",
    f"{MESSAGES}/batches": "this server has no batches: send each message by itself",
    "/v1/batches": "this server has no batches: send each request by itself",
}
"""Prefixes of paths of other servers, and why this server does not have them."""
JSON_GROWTH = 6
"""Largest ratio of a body to the same request over gRPC: a byte of text takes up to 6 characters (\\u0000)."""


def is_known(path: str) -> bool:
    return path in (*COMPLETIONS, COUNT_TOKENS, LOAD_ADAPTER, UNLOAD_ADAPTER, MODELS, HEALTH, METRICS, STATUS, PAGE)


def refusal_of(path: str) -> str:
    """Why `path` does not exist."""
    return next((why for start, why in REFUSED.items() if path.startswith(start)), "there is nothing at this path")
