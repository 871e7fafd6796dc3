"""The protocol of load tools, to the letter: what `vllm bench serve --backend openai` sends, and how it reads a reply.

Its reader splits at blank lines, skips comments, and takes text from events with choices, counts from those without.
"""

from __future__ import annotations

import json

import pytest

from core.records import FinishReason
from deploy.calls import CallId
from deploy.http.wire import Call, Head
from tests.deploy.grpc.rpc import Script
from tests.deploy.http.clients import said, servicer

PAYLOAD = {
    "model": "pair",
    "prompt": "say",
    "repetition_penalty": 1.0,
    "max_tokens": 6,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
CHAT = {
    "model": "pair",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "say"}]}],
    "max_completion_tokens": 6,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}


async def read(path, payload):
    """The texts, the count of tokens and whether the end was seen, as the tool has them."""
    script = Script(*said("ab", "cd", "ef", finish=FinishReason.LENGTH))
    http = servicer(script)
    call = Call("POST", path, "Bearer key", CallId("bench-0"), json.dumps(payload).encode())
    head, *parts = [part async for part in http.respond(call)]
    assert isinstance(head, Head)
    assert (head.status, dict(head.headers)["content-type"].split(";")[0]) == (200, "text/event-stream")
    texts, num_tokens, is_done = [], None, False
    for message in b"".join(parts).decode().split("\n\n"):
        chunk = message.strip().removeprefix("data: ")
        if not chunk or chunk.startswith(":"):
            continue
        if chunk == "[DONE]":
            is_done = True
            continue
        data = json.loads(chunk)
        if choices := data.get("choices"):
            texts.append(choices[0].get("text", choices[0].get("delta", {}).get("content")))
        elif usage := data.get("usage"):
            num_tokens = usage.get("completion_tokens")
    return script, texts, num_tokens, is_done


@pytest.mark.parametrize(("path", "payload"), [("/v1/completions", PAYLOAD), ("/v1/chat/completions", CHAT)])
async def test_a_stream_is_read_as_load_tools_read_it(path, payload):
    script, texts, num_tokens, is_done = await read(path, payload)
    assert (texts, is_done) == (["ab", "cd", "ef"], True)
    (request,) = script.requests
    assert (request.ignore_eos, request.max_tokens) == (True, 6)
    assert num_tokens == 6
