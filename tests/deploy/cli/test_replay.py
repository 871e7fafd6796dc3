"""`outrider generate --save` and `outrider replay`, over a real gRPC server whose completions are written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from core.errors import ConfigError, InvalidRequest
from deploy.cli import main
from deploy.cli.jobs import Job
from deploy.cli.replay import _prompt_of, save
from outrider_client import Chunk, Client, Finish, Usage
from tests.deploy.grpc import rpc
from tests.deploy.grpc.rpc import Script, greeting, ids_of, server
from tests.vocabularies import as_product, byte_level


def run(*argv: str) -> int:
    return main.main([str(each) for each in argv])


@pytest.fixture
def kept(tmp_path):
    file = tmp_path / "receipt.json"
    with server(Script(*greeting())) as address:
        assert run("generate", "say", "--address", address, "--seed", "7", "--save", file) == 0
    return file


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_what_is_saved_is_the_receipt_the_request_and_the_tokens(kept):
    content = json.loads(kept.read_text())
    assert content["request"] == {"text": "say"}
    assert content["token_ids"] == list(ids_of("hello") + ids_of(" wor") + ids_of("d"))
    receipt = content["receipt"]
    assert (receipt["model"], receipt["sampling"]["seed"], receipt["sampling"]["temperature"]) == ("pair", 7, 0.7)
    assert receipt["output_tokens"] == len(content["token_ids"])
    assert "say" not in json.dumps(receipt)


@pytest.mark.parametrize(
    ("request_", "prompt", "source"),
    [
        ({"source": "s"}, None, {"source": "s"}),
        ({"source": "s", "text": "p"}, "p", {"source": "s"}),
        ({"source_token_ids": {"ids": [5, 6]}}, None, {"source_token_ids": [5, 6]}),
        ({"prompt": "", "source": "s"}, None, {"source": "s"}),
        ({"prompt": "p", "source": [5, 6]}, "p", {"source_token_ids": [5, 6]}),
    ],
)
def test_a_source_is_asked_again(request_, prompt, source):
    assert _prompt_of(request_) == (prompt, source)


def test_a_saved_request_has_its_source(tmp_path):
    finish = Finish("stop", None, 7, None, receipt={})
    job = Job("", {"source": "s"}, chunks=[Chunk("", (), (), (), Usage(1, 0), finish)])
    save(tmp_path / "kept", job)
    assert json.loads((tmp_path / "kept").read_text())["request"] == {"source": "s"}


def test_an_output_that_comes_out_again_is_the_same(kept, capsys):
    script = Script(*greeting())
    with server(script) as address, server(Script(*greeting())) as other:
        assert run("replay", kept, "--address", address, "--address", other) == 0
    lines = capsys.readouterr().err.splitlines()[-2:]
    assert lines == [f"{each}: same: all {len(ids_of('hello word'))} tokens are the same" for each in (address, other)]
    request = script.requests[0]
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.7), "as resolved, not as a default is now"


def test_another_output_is_told_by_its_first_token(kept, capsys):
    hello, last = greeting()
    changed = replace(last, token_ids=(*last.token_ids[:-1], last.token_ids[-1] + 1))
    with server(Script(hello, changed)) as address:
        assert run("replay", kept, "--address", address) == 1
    first = len(ids_of("hello")) + len(last.token_ids) - 1
    assert f"differs: the output differs from token {first} on" in capsys.readouterr().err


def test_an_output_that_was_cut_short_says_why(capsys):
    problem = InvalidRequest("structured_output", "cannot be followed")
    first, last = greeting()
    with server(Script(first, replace(last, problem=problem))) as address:
        assert run("generate", "say", "--address", address) == 0
    assert "; cut short: structured_output: cannot be followed" in capsys.readouterr().err


def test_other_weights_are_not_comparable_and_named(kept, capsys):
    edit(kept, lambda content: content["receipt"]["target"].update(digest="sha256:other"))
    with server(Script(*greeting())) as address:
        assert run("replay", kept, "--address", address) == 2
    assert "not comparable: target.digest differs ('sha256:other', now '')" in capsys.readouterr().err


@pytest.mark.parametrize(
    "request_json", [{"text": "say"}, {"prompt": "say"}, {"token_ids": {"ids": [*ids_of("say")]}}, {"prompt": [1, 2]}]
)
def test_a_receipt_alone_needs_its_request(kept, tmp_path, capsys, request_json):
    alone, request = tmp_path / "alone.json", tmp_path / "request.json"
    alone.write_text(json.dumps(json.loads(kept.read_text())["receipt"]))
    assert run("replay", alone) == 2
    assert "give the file with --request FILE" in capsys.readouterr().err
    request.write_text(json.dumps(request_json))
    with server(Script(*greeting())) as address:
        status = run("replay", alone, "--request", request, "--address", address)
    is_the_prompt = request_json != {"prompt": [1, 2]}
    text = capsys.readouterr().err
    assert ("prompt_digest differs" in text) is not is_the_prompt or "token_ids" in request_json
    assert status in ((0,) if "text" in request_json or request_json.get("prompt") == "say" else (0, 2))


SHOWN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.tool_call_id }} "
    "{{ (m.tool_calls or []) | length }}{% endfor %}"
    "{{ (tools or []) | length }} {{ reasoning_effort }} {{ enable_thinking }} {{ mark }}"
)
HELLO = [{"role": "user", "content": "say"}]
RULED = [{"role": "system", "content": "be short"}, *HELLO]
CALLED = [
    {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]


@pytest.mark.parametrize(
    ("request_json", "given"),
    [
        ({"messages": HELLO}, {"messages": HELLO}),
        ({"messages": HELLO, "reasoning_effort": "low"}, {"template_arguments": {"reasoning_effort": "low"}}),
        (
            {"messages": HELLO, "reasoning_effort": "none"},
            {"template_arguments": {"reasoning_effort": "none", "enable_thinking": False}},
        ),
        (
            {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"template_arguments": {"reasoning_effort": "high"}},
        ),
        ({"messages": [{**RULED[0], "role": "developer"}, *HELLO]}, {"messages": RULED}),
        ({"chat": {"messages": HELLO, "template_arguments": '{"mark": 1}'}}, {"template_arguments": {"mark": 1}}),
        ({"chat": {"messages": HELLO, "tools": [{"name": "f"}]}}, {"tools": [{"name": "f"}]}),
        ({"chat": {"messages": [*HELLO, *CALLED]}}, {"messages": [*HELLO, *CALLED]}),
    ],
    ids=str,
)
def test_a_chat_is_sent_with_all_that_its_template_was_given(kept, tmp_path, monkeypatch, request_json, given):
    edit(kept, lambda content: content["receipt"]["stopping"].update(max_tokens=2))
    monkeypatch.setattr(rpc, "TOKENIZER", as_product(byte_level(), SHOWN))
    request, script, expected = tmp_path / "request.json", Script(*greeting()), Script(*greeting())
    request.write_text(json.dumps(request_json))
    with server(script) as address, server(expected) as there, Client(there) as client:
        assert run("replay", kept, "--request", request, "--address", address) == 2, "it is of another prompt"
        client.generate(**{"messages": HELLO, "max_tokens": 2, **given})
    assert script.requests[0].prompt == expected.requests[0].prompt


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "cannot be read as JSON"), ("[]", "must hold an object"), ('{"receipt": 3}', "holds no receipt")],
)
def test_what_is_no_receipt_is_said_to_be_none(tmp_path, capsys, content, problem):
    file = tmp_path / "receipt.json"
    file.write_text(content)
    assert run("replay", file) == 2
    assert problem in capsys.readouterr().err


def test_a_chat_whose_last_message_was_continued_cannot_be_sent(kept, tmp_path, capsys):
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": HELLO, "continue_final_message": True}))
    assert run("replay", kept, "--request", request, "--address", "localhost:1") == 2
    assert "continue_final_message" in capsys.readouterr().err


def test_a_server_that_is_not_there_can_compute_nothing_again(kept, capsys):
    assert run("replay", kept, "--address", "localhost:1") == 2
    assert "it cannot be recomputed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"prompt": ["say", "see"]}, "has 2 prompts"), ({"prompt": "say", "truncate_prompt_tokens": 2}, "was cut")],
)
def test_a_request_whose_prompt_is_not_the_receipt_s_is_refused(fields, problem):
    with pytest.raises(ConfigError, match=problem):
        _prompt_of(fields)
    assert _prompt_of({"prompt": ["say"]}) == ("say", {})
    assert _prompt_of({"prompt": [[5, 6]]}) == (None, {"token_ids": [5, 6]})


def test_one_receipt_is_of_one_prompt(tmp_path, capsys):
    assert run("generate", "one", "two", "--save", tmp_path / "file") == 1
    assert "give one prompt" in capsys.readouterr().err
