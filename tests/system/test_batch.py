"""A batch in one process gives, token for token, what the service gives."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider_client import Client

pytestmark = pytest.mark.ray

PROMPTS = ["import os", "def read_lines(path):", "class Point:\n    def __init__(self, x", "for name in names:\n"]


def test_a_batch_gives_the_tokens_of_the_service(running):
    shared = [
        {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True},
        {"max_tokens": 24, "temperature": 0.9, "seed": 5, "ignore_eos": True},
        {"max_tokens": 24, "temperature": 0.7, "top_p": 0.9, "seed": 6, "frequency_penalty": 0.5, "stop": ["return"]},
        {"max_tokens": 16, "temperature": 1.0, "seed": 7, "n": 2, "regex": "[a-z ]{20,40}"},
    ]
    with Client(running.address) as client:
        served = [client.generate(prompt, **fields) for prompt, fields in zip(PROMPTS, shared, strict=True)]
    with LLM(progress=False) as llm:
        batch = llm.generate(PROMPTS, [SamplingParams(**fields) for fields in shared])
    for one, other in zip(served, batch, strict=True):
        assert [each.token_ids for each in one.samples] == [each.token_ids for each in other.outputs]
        assert [each.text for each in one.samples] == [each.text for each in other.outputs]
        assert [each.finish.reason for each in one.samples] == [each.finish_reason for each in other.outputs]
