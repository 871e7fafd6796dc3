"""The fields of a beam search: from each language of the API to the record, and what is refused beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from core.config import EngineConfig, Limits, ServiceConfig, TargetConfig
from core.errors import InvalidRequest
from core.records import BeamSearch, GenerationRequest, ModelInfo, Sampling
from deploy.api import Served
from deploy.grpc import translate as grpc
from deploy.http import translate as http
from deploy.http.failures import parse
from deploy.http.openai.bodies import CompletionBody
from deploy.http.openai.chat_body import ChatBody
from outrider_client import request as client
from tests.vocabularies import as_product, byte_level

TOKENIZER = as_product(byte_level(), "{{ messages[0].content }}")
INFO = ModelInfo("target", "Llama", "float32", "cpu", 0, TOKENIZER.vocab_size, 50, 10_000, (1,))
CONFIG = ServiceConfig(TargetConfig(EngineConfig("/target")), model_name="pair")


def served(info: ModelInfo = INFO) -> Served:
    return Served(info, None, TOKENIZER, Sampling(temperature=0.7), CONFIG)


def by_client(info: ModelInfo = INFO, **fields: Any) -> list[GenerationRequest]:
    return grpc.to_requests(client.to_message("ab", fields), served(info), 0.0)


def by_http(kind: Any = CompletionBody, **fields: Any) -> list[GenerationRequest]:
    asked = {"prompt": "ab"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "ab"}]}
    return http.to_requests(parse(kind, json.dumps({**asked, **fields}).encode()), served(), 0.0, "r")


def test_a_search_is_one_request_however_many_outputs_it_returns() -> None:
    requests = by_client(beam_width=4, n=3, length_penalty=0.5, early_stopping="never")
    assert len(requests) == 3
    assert requests[0] is requests[1] is requests[2]
    assert requests[0].beams == BeamSearch(4, 3, 0.5, "never")
    assert requests[0].sampling.is_greedy, "whatever the model's default is"


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@pytest.mark.parametrize(
    ("fields", "search"),
    [
        ({"n": 2}, BeamSearch(2, 2)),
        ({"best_of": 4}, BeamSearch(4, 1)),
        ({"n": 2, "best_of": 4, "length_penalty": 2.0, "early_stopping": True}, BeamSearch(4, 2, 2.0, True)),
        ({"best_of": 4, "early_stopping": "never"}, BeamSearch(4, 1, 1.0, "never")),
    ],
)
def test_the_fields_of_vllm_reach_it(kind: Any, fields: dict[str, Any], search: BeamSearch) -> None:
    assert by_http(kind, use_beam_search=True, temperature=0.0, **fields)[0].beams == search


def test_without_beams_nothing_is_searched() -> None:
    assert by_client()[0].beams is None
    assert by_http(use_beam_search=False, best_of=1, length_penalty=None)[0].beams is None
    assert by_http(length_penalty=1.0, early_stopping=False)[0].beams is None, "vLLM's defaults"


def test_a_search_may_be_traced() -> None:
    assert by_client(beam_width=2, trace=True)[0].wants_trace


def test_a_search_holds_one_place_however_many_outputs_it_returns() -> None:
    small = replace(CONFIG, limits=Limits(max_sessions=2))
    asked = client.to_message("ab", {"beam_width": 4, "n": 3})
    assert len(grpc.to_requests(asked, replace(served(), config=small), 0.0)) == 3


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_width": 65}, "beams.beam_width"),
        ({"length_penalty": 2.0}, "beams.length_penalty"),
        ({"early_stopping": "never"}, "beams.beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "beams.length_penalty"),
        ({"beam_width": 2, "temperature": 0.5}, "sampling.temperature"),
        ({"beam_width": 2, "stop": "x"}, "stopping.stop"),
        ({"beam_width": 2, "resume_token_ids": [5]}, "resume_token_ids"),
        ({"beam_width": 2, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"beam_width": 2, "receipt": True}, "receipt"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str) -> None:
    seeded = {"seed": 1} if "resume_token_ids" in fields else {}
    with pytest.raises(InvalidRequest, match=f"^{field}:"):
        by_client(**fields, **seeded)


def test_a_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^beams: .*recurrent"):
        by_client(replace(INFO, num_states=9), beam_width=2)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"length_penalty": 0.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "best_of": 65}, "best_of"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "n"),
        ({"use_beam_search": True, "length_penalty": 99.0}, "length_penalty"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ],
)
def test_bodies_name_their_own_fields(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}:"):
        by_http(**fields)
