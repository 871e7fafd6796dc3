"""A text with a token that the model has no row for is refused by every API, under the field's name there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from core.errors import InvalidRequest
from core.records import Sampling
from deploy.api import Served
from deploy.grpc.translate import to_requests as of_message
from deploy.http.anthropic import MessagesBody
from deploy.http.failures import parse
from deploy.http.openai import ChatBody, CompletionBody, ResponsesBody
from deploy.http.translate import prompt_of
from deploy.http.translate import to_requests as of_body
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.http.test_http_translate import CONFIG, INFO, TOKENIZER, VOCAB

LAST = VOCAB - 1
SAID = "say <한>"
"""Ends in the tokenizer's last token, which was added to it."""
CHAT = [{"role": "user", "content": SAID}]
PROBLEM = rf"must not hold '<한>', which is token {LAST}, but the model has only the ids 0 to {LAST - 1}"


def served(num_rows: int) -> Served:
    return Served(replace(INFO, vocab_size=num_rows), None, TOKENIZER, Sampling(), CONFIG)


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (CompletionBody, {"prompt": SAID}, "prompt"),
        (CompletionBody, {"prompt": "say", "bad_words": [SAID]}, "bad_words[0]"),
        (ChatBody, {"messages": CHAT}, "messages"),
        (ResponsesBody, {"input": SAID}, "input"),
        (MessagesBody, {"messages": CHAT, "max_tokens": 4, "model": "m"}, "messages"),
    ],
)
def test_by_http(kind: Any, fields: dict[str, Any], name: str) -> None:
    body = parse(kind, json.dumps(fields).encode())
    assert of_body(body, served(VOCAB), 0.0, "mine")
    with pytest.raises(InvalidRequest, match=PROBLEM) as caught:
        of_body(body, served(LAST), 0.0, "mine")
    assert caught.value.field == name


def test_where_its_tokens_are_counted() -> None:
    body = parse(MessagesBody, json.dumps({"messages": CHAT, "max_tokens": 4, "model": "m"}).encode())
    with pytest.raises(InvalidRequest, match=PROBLEM):
        prompt_of(body, served(LAST))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": SAID}, "text"),
        ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(**CHAT[0])])}, "chat.messages"),
        ({"text": "say", "sampling": pb.SamplingParams(bad_words=[SAID])}, "sampling.bad_words[0]"),
    ],
)
def test_by_grpc(fields: dict[str, Any], name: str) -> None:
    message = pb.GenerateRequest(**fields)
    assert of_message(message, served(VOCAB), 0.0)
    with pytest.raises(InvalidRequest, match=PROBLEM) as caught:
        of_message(message, served(LAST), 0.0)
    assert caught.value.field == name
