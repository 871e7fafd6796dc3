"""Each field of each HTTP body over a real socket: it arrives, or is ignored, or is refused by its name.

A field that is new in a body fails here until it stands in one of the tables in `bodies.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn

from core.records import TokenLogprobs
from deploy.api.authentication import Authenticator
from deploy.api.hosted import Hosted, Models, Served
from deploy.api.offload import Offload
from deploy.clock import MonotonicClock
from deploy.http.servicer import HttpServicer
from deploy.metrics.meters import Meters
from tests.deploy.contract.bodies import ARRIVES, BARE, IGNORED, REFUSED, Fragment, fields_of
from tests.deploy.contract.fields import PAIR
from tests.deploy.grpc.rpc import Recorded, Script, greeting
from tests.deploy.http import clients
from tests.deploy.http import test_http_translate as wrong
from tests.vocabularies import as_product, byte_level

TEMPLATE = clients.TEMPLATE + "{{ messages | tojson }}{{ flag | default('') }}"
"""Whatever a chat says is in the prompt, tools and reasoning among it."""
DRAWN = re.compile(r'"(id|item_id|call_id|created|created_at|request_id)":("[^"]*"|[0-9.]+)')
"""Fields that are new in each reply."""


class Server:
    """A servicer behind a socket, and what reaches it."""

    def __init__(self, pair: Served) -> None:
        logprobs = TokenLogprobs(-0.5, ((7, -0.25), (8, -1.5)))
        chunks = [replace(each, logprobs=(logprobs,) * len(each.token_ids)) for each in greeting()]
        self.script = Script(*chunks)
        models = Models([Hosted(self.script, pair, Meters(Recorded(), MonotonicClock().now))])
        servicer = HttpServicer(models, MonotonicClock(), Authenticator(None), Offload())
        config = uvicorn.Config(clients.app(servicer), port=0, ws="none", lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        while not self._server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield self
        self._server.should_exit = True
        thread.join()

    def post(self, path: str, body: Fragment) -> tuple[int, str]:
        """The status, and the reply without what is new in each."""
        port = self._server.servers[0].sockets[0].getsockname()[1]
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        text = DRAWN.sub(r'"\1":0', reply.read().decode())
        connection.close()
        return reply.status, text

    def outcome(self, path: str, fragment: Fragment) -> tuple[int, str, list[Any]]:
        """The reply to a body that also has `fragment`, and the records behind it."""
        del self.script.requests[:]
        status, reply = self.post(path, {"seed": 7, **BARE[path], **fragment})
        return status, reply, [*self.script.requests]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(replace(PAIR, tokenizer=as_product(byte_level(), TEMPLATE))).running() as running:
        yield running


def cases(table: Any) -> list[Any]:
    return [pytest.param(path, field, id=f"{path}-{field}") for path in BARE for field in table[path]]


@pytest.mark.parametrize("path", BARE)
def test_no_field_of_a_body_is_left_out(path):
    assert {*ARRIVES[path], *IGNORED[path], *REFUSED[path], "model"} == fields_of(path)


@pytest.mark.parametrize(("path", "field"), cases(ARRIVES))
def test_a_field_arrives(server, path, field):
    sent = ARRIVES[path][field]
    with_it, without = sent if isinstance(sent, tuple) else (sent, {})
    found, plain = server.outcome(path, with_it), server.outcome(path, without)
    assert (found[0], plain[0]) == (200, 200), (found, plain)
    assert found[1:] != plain[1:]
    if field != "timeout_s":  # of which the clock makes a deadline
        assert found == server.outcome(path, with_it), "or the difference says nothing"


@pytest.mark.parametrize(("path", "field"), cases(IGNORED))
def test_a_field_that_is_ignored_changes_nothing(server, path, field):
    sent = IGNORED[path][field]
    with_it, without = sent if isinstance(sent, tuple) else (sent, {})
    found, plain = server.outcome(path, with_it), server.outcome(path, without)
    assert (found[0], plain[0]) == (200, 200), (found, plain)
    assert found[2] == plain[2]
    assert found[1] == plain[1] or path == "/v1/responses", "where a reply repeats what was asked for"


@pytest.mark.parametrize(("path", "field"), cases(REFUSED))
def test_a_field_that_is_not_supported_is_refused_by_its_name(server, path, field):
    status, reply, requests = server.outcome(path, REFUSED[path][field])
    assert (status, requests) == (400, [])
    message = re.sub(r"\[\d+\]", "", json.loads(reply)["error"]["message"])
    assert message.startswith(f"{field}: "), message


@pytest.mark.parametrize("path", BARE)
def test_a_model_is_chosen_by_its_name(server, path):
    assert server.outcome(path, {"model": "pair"}) == server.outcome(path, {})
    assert server.outcome(path, {"model": "another"})[0] == 404


WRONG = [
    *(("/v1/completions", {"prompt": "say", **fields}, param) for fields, param in (*wrong.BOTH, *wrong.COMPLETION)),
    *(("/v1/chat/completions", {"messages": [*wrong.HELLO], **fields}, param)
      for fields, param in (*wrong.BOTH, *wrong.CHAT)),
]  # fmt: skip


def test_wrong_values_are_refused_over_the_socket_in_openai_s_form():
    unlike = []
    with Server(wrong.served()).running() as server:
        for path, body, param in WRONG:
            status, reply = server.post(path, body)
            said = json.loads(reply)["error"]
            is_right = (status, said["type"], said["param"]) == (400, "invalid_request_error", param)
            unlike += [] if is_right and said["message"] else [(path, param, status, said)]
    assert unlike == []
    assert len(WRONG) >= 150
