"""The source of a request: from each language of the API to the beginning of the text, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from core.config import EngineConfig, ServiceConfig, TargetConfig
from core.errors import InvalidRequest
from core.records import GenerationRequest, ModelInfo, Sampling
from deploy.api import Served
from deploy.grpc import translate as grpc
from deploy.http import translate as http
from deploy.http.failures import parse
from deploy.http.openai.bodies import CompletionBody
from deploy.http.openai.chat_body import ChatBody
from outrider_client import request as client
from protos.outrider.v1 import generation_pb2 as pb
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level(), "{{ messages[0].content }}")
DECODER = ModelInfo("target", "Llama", "float32", "cpu", 0, TOKENIZER.vocab_size, 20, 10_000, (1,))
BOTH = replace(DECODER, architecture="T5", max_source_tokens=30, decoder_start=(0, 9))
CONFIG = ServiceConfig(TargetConfig(EngineConfig("/target")), model_name="pair")


def served(info: ModelInfo = BOTH) -> Served:
    return Served(info, None, TOKENIZER, Sampling(), CONFIG)


def by_grpc(info: ModelInfo = BOTH, **fields: Any) -> GenerationRequest:
    given = {name: pb.TokenIds(ids=ids) if name.endswith("token_ids") else ids for name, ids in fields.items()}
    (request,) = grpc.to_requests(pb.GenerateRequest(**given), served(info), 0.0)
    return request


def by_http(kind: Any = CompletionBody, info: ModelInfo = BOTH, **fields: Any) -> GenerationRequest:
    (request,) = http.to_requests(parse(kind, json.dumps(fields).encode()), served(info), 0.0, "r")
    return request


def test_the_prompt_is_the_source() -> None:
    assert by_grpc(token_ids=[5, 6, 7]).prompt == (5, 6, 7, 0, 9)
    assert by_grpc(token_ids=[5, 6, 7]).num_source == 3
    text = TOKENIZER.encode("ab")
    assert by_grpc(text="ab").prompt == (*text, 0, 9)
    assert by_http(prompt="ab").prompt == (*text, 0, 9)
    assert by_http(prompt="ab").num_source == len(text)


def test_a_chat_is_rendered_into_the_source() -> None:
    request = by_http(ChatBody, messages=[{"role": "user", "content": "ab"}])
    text = TOKENIZER.encode("ab", add_special_tokens=False)
    assert (request.prompt, request.num_source) == ((*text, 0, 9), len(text))


def test_beside_a_source_the_prompt_begins_the_decoders_text() -> None:
    """After the start token, without the first token that the model forces where there is no prefix."""
    assert by_grpc(source_token_ids=[5, 6], token_ids=[7, 8]).prompt == (5, 6, 0, 7, 8)
    assert by_grpc(source_token_ids=[5, 6]).prompt == (5, 6, 0, 9)
    source, prefix = TOKENIZER.encode("ab"), TOKENIZER.encode("c", add_special_tokens=False)
    assert by_grpc(source="ab", text="c").prompt == (*source, 0, *prefix)
    assert by_http(source="ab", prompt="c").prompt == (*source, 0, *prefix)
    assert by_http(source=[5, 6], prompt="").prompt == (5, 6, 0, 9)


def test_the_client_sends_a_source() -> None:
    message = client.to_message(None, {"source": "ab"})
    (request,) = grpc.to_requests(message, served(), 0.0)
    assert request.prompt == (*TOKENIZER.encode("ab"), 0, 9)
    assert client.to_message("c", {"source_token_ids": [5, 6]}).source_token_ids.ids == [5, 6]


def test_a_source_takes_no_room_of_the_decoders_context() -> None:
    assert by_grpc(token_ids=[5] * 30).max_tokens == 20 - 2
    assert by_grpc(DECODER, token_ids=[5] * 10).max_tokens == 10


@pytest.mark.parametrize(
    ("info", "fields", "field", "problem"),
    [
        (DECODER, {"source": "ab", "text": "c"}, "source", "without an encoder"),
        (DECODER, {"source_token_ids": [5], "token_ids": [5]}, r"source_token_ids\.ids", "without an encoder"),
        (BOTH, {"source": ""}, "source", "at least one token"),
        (BOTH, {"source_token_ids": []}, r"source_token_ids\.ids", "at least one token"),
        (BOTH, {"token_ids": []}, "token_ids.ids", "at least one token"),
        (BOTH, {"source_token_ids": [5] * 31}, "source_token_ids", "at most 30 tokens long, got 31"),
        (BOTH, {"token_ids": [5] * 31}, "token_ids", "at most 30 tokens long, got 31"),
        (BOTH, {"source_token_ids": [5, 10**6]}, r"source_token_ids\.ids\[1\]", "must be in"),
        (BOTH, {"source_token_ids": [5], "source": "a"}, "source", "beside source_token_ids"),
        (BOTH, {"source": "a", "token_ids": [5] * 20}, "token_ids", "at most"),
        (BOTH, {}, "prompt", "must be given"),
    ],
)
def test_refusals_name_the_field(info: ModelInfo, fields: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}.*{problem}"):
        by_grpc(info, **fields)


def test_scores_of_a_prompt_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_logprobs"):
        by_http(prompt="ab", prompt_logprobs=1)


def test_a_body_has_one_name_for_both_kinds_of_source() -> None:
    with pytest.raises(InvalidRequest, match=r"^source\[1\]"):
        by_http(prompt="", source=[5, 10**6])
    with pytest.raises(InvalidRequest, match=r"^source: must not be given"):
        by_http(info=DECODER, prompt="a", source=[5])


def test_an_encoder_decoder_drafts_only_for_one() -> None:
    assert "encoder" in (DECODER.draft_problem(BOTH) or "")
    assert BOTH.draft_problem(BOTH) is None
    assert BOTH.draft_problem(DECODER) is None
