"""The page and the figures that it asks for, from the endpoints: no browser, no Ray."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest

from core.config import HttpConfig
from deploy.api.authentication import Authenticator
from deploy.http.page import FOLDER, SCRIPTS, page_now
from deploy.http.wire import Head
from tests.deploy.grpc.rpc import REPORT, Script, greeting, ids_of
from tests.deploy.http.clients import hosted
from tests.deploy.http.test_http_servicer import call, error, events, respond, servicer, whole

STATUS = "/v1/outrider/status"


@pytest.fixture
def guarded(tmp_path):
    (tmp_path / "tokens").write_text("secret")
    return servicer(Script(), authenticator=Authenticator(tmp_path / "tokens"))


def policy_of(head: Head) -> dict[str, list[str]]:
    parts = dict(head.headers)["content-security-policy"].split("; ")
    return {name: sources for name, *sources in map(str.split, parts)}


async def test_the_page_is_shown_to_everybody(guarded):
    head, content = await respond(guarded, call("/", "GET"))
    assert (head.status, dict(head.headers)["content-type"]) == (200, "text/html; charset=utf-8")
    assert content.startswith(b"<!doctype html>")
    assert dict(head.headers)["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("tag", ["style", "script"])
async def test_its_policy_runs_what_it_has_and_nothing_else(tag):
    head, content = await respond(servicer(Script()), call("/", "GET"))
    (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", content.decode(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    policy = policy_of(head)
    assert policy[f"{tag}-src"] == [f"'sha256-{digest}'"]
    assert (
        policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == ["'none'"]
    )
    assert policy["connect-src"] == ["'self'"]
    assert policy["require-trusted-types-for"] == ["'script'"]


def test_it_loads_nothing_from_elsewhere():
    found = re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?([^"'\s)>]+)""", page_now()[1].decode())
    assert set(found) <= {"#output"}


def test_it_makes_no_markup_of_texts():
    """Trusted Types would refuse it, where the browser has them."""
    script = "".join((FOLDER / name).read_text() for name in SCRIPTS)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser", script)


def test_all_scripts_are_part_of_it():
    assert {path.name for path in FOLDER.glob("*.js")} == set(SCRIPTS)


async def test_it_can_be_switched_off():
    off = servicer(Script(), models=hosted(Script(), http=HttpConfig(page=False)))
    head, content = await error(off, call("/", "GET"))
    assert (head.status, content["message"]) == (404, "there is nothing at this path")


async def test_it_takes_get_alone():
    head, _ = await error(servicer(Script()), call("/", "POST"))
    assert (head.status, dict(head.headers)["allow"]) == (405, "GET, HEAD")


# The figures


async def test_the_status_has_what_control_reports_the_queue_and_the_replicas():
    models = hosted(Script())
    models.all[0].num_replicas = {"target": 2, "draft": 3}
    _, reply = await whole(servicer(Script(), models=models), call(STATUS, "GET"))
    (model,) = reply["models"]
    assert model["model"] == "pair"
    assert (model["target"]["name"], model["draft"]) == ("target", None)
    assert model["replicas"] == {"target": 2, "draft": 3}
    assert model["queue"]["running"] == REPORT.num_sessions
    assert (model["queue"]["waiting"], model["queue"]["expected_wait_s"]) == (0, 0.0)
    assert model["control"]["acceptance"] == [0.8, 0.7]
    assert (model["control"]["draft_tokens"], model["control"]["block_tokens"]) == (5, 12)


async def test_the_status_asks_for_a_token(guarded):
    assert (await respond(guarded, call(STATUS, "GET")))[0].status == 401
    assert (await respond(guarded, call(STATUS, "GET", authorization="Bearer secret")))[0].status == 200


# What the page makes pictures of


async def test_a_traced_stream_has_who_made_each_token():
    pieces = await events(servicer(Script(*greeting())), call(stream=True, speculation={"trace": True}))
    first, last = [piece["choices"][0]["outrider"] for piece in pieces]
    assert [token["source"] for token in first["tokens"]] == ["target"]
    guessed, own = ids_of(" wor"), ids_of("d")
    assert [token["id"] for token in last["tokens"]] == [*guessed, *own]
    assert [token["source"] for token in last["tokens"]] == ["draft"] * len(guessed) + ["target"]
    assert "".join(token["text"] for token in last["tokens"]) == " word"
    assert last["seed"] is not None


async def test_a_traced_stream_has_its_calls_and_blocks():
    script = Script(*greeting())
    reply = (await whole(servicer(script), call(speculation={"trace": True})))[1]
    prefill, growth, verify = reply["choices"][0]["outrider"]["trace"]
    assert script.requests[0].wants_trace
    assert [each["call"] for each in (prefill, growth, verify)] == ["verify", "growth", "verify"]
    assert prefill["timing"] == {"waited_s": 0.001, "computed_s": 0.005, "passes": 1, "rows": 3}
    assert (growth["timing"], growth["verified"]) == (None, None)
    block = verify["verified"]
    assert "".join(block["texts"][node] for node in block["path"]) + block["next_text"] == " word"
    assert block["parents"][: len(block["path"])] == [*range(-1, len(block["path"]) - 1)]


async def test_a_token_behind_the_end_of_an_output_has_no_entry():
    first, last = greeting()
    cut = replace(last, token_ids=last.token_ids[:-1], is_guess=last.is_guess[:-1], text=" wor")
    reply = (await whole(servicer(Script(first, cut)), call(speculation={"trace": True})))[1]
    assert {token["source"] for token in reply["choices"][0]["outrider"]["tokens"][1:]} == {"draft"}


async def test_who_has_not_asked_has_no_trace():
    reply = (await whole(servicer(Script(*greeting())), call()))[1]
    assert not {"trace", "tokens"} & set(reply["choices"][0]["outrider"])
    assert "sources" in json.dumps(reply["choices"][0]["outrider"]["speculation"])


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_other_replies_have_no_place_for_a_trace(path):
    given = {"input": "say"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "a"}]}
    body = {**given, **({"max_tokens": 4} if "messages" in path else {}), "speculation": {"trace": True}}
    head, content = await respond(servicer(Script(), models=hosted(Script())), call(path, **body))
    assert head.status == 400
    assert "speculation.trace" in content.decode()
