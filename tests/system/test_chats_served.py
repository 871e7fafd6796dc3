"""Chats by gRPC with the running service: in the terminal, and with tools that its chat template shows."""

from __future__ import annotations

import io
import sys

import pytest

from deploy.cli import main

pytestmark = pytest.mark.ray

TOOLS = [{"name": "weather", "parameters": {"type": "object"}}]
CALL = {"id": "1", "name": "weather", "arguments": {"city": "Oslo"}}


def test_lines_are_answered_in_turn_by_the_models_template(guarded, grpc_client, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(x):\n/reset\nimport os\nand more\n"))
    monkeypatch.setenv("OUTRIDER_TOKEN", guarded.token)
    assert main.main(["chat", "--address", guarded.address, "--max-tokens", "12", "--temperature", "0"]) == 0
    said = []
    for question in ("import os", "and more"):
        said.append({"role": "user", "content": question})
        answer = grpc_client.generate(messages=said, max_tokens=12, temperature=0.0).text
        said.append({"role": "assistant", "content": answer})
    out, err = capsys.readouterr()
    assert out.endswith(f"{said[1]['content']}\n{said[3]['content']}\n")
    assert err.count("12 tokens in ") == 3


def test_tools_and_calls_go_to_the_template_as_by_http(client, grpc_client):
    asked = {"role": "user", "content": "How is the weather?"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    by_http = client.chat.completions.create(
        model="outrider-demo",
        messages=[
            asked,
            {
                **called,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
                ],
            },
        ],
        tools=[{"type": "function", "function": TOOLS[0]}],
        max_tokens=8,
        temperature=0.0,
    )
    by_grpc = grpc_client.generate(messages=[asked, called], tools=TOOLS, max_tokens=8, temperature=0.0)
    assert by_grpc.usage.prompt_tokens == by_http.usage.prompt_tokens
    assert by_grpc.text == by_http.choices[0].message.content
    plain = grpc_client.generate(messages=[asked], max_tokens=8, temperature=0.0)
    assert plain.usage.prompt_tokens < by_grpc.usage.prompt_tokens
