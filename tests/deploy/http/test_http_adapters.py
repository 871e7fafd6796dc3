"""Adapters by the name in `model`: what callers see, and vLLM's endpoints that load and unload them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.errors import CheckpointError
from core.records import Adapter
from deploy.api.hosted import Hosted, Models
from deploy.clock import MonotonicClock
from deploy.metrics.meters import Meters
from tests.deploy.grpc.rpc import INFO, Recorded, Script, greeting, served
from tests.deploy.http.test_http_servicer import call, error, respond, servicer, whole

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SET = Adapter("set", "/adapters/set", "sha256:00")


class Store:
    """Adapters as the targets have them; one path is refused."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}

    async def load(self, adapter):
        if adapter.path == "/broken":
            raise CheckpointError(f"adapter {adapter.name!r} in /broken: r must be in [1, 512], got 0")
        self.adapters[adapter.name] = replace(adapter, digest="sha256:01")

    async def unload(self, name):
        del self.adapters[name]

    async def listed(self):
        return dict(self.adapters)


@pytest.fixture
def script():
    return Script(*greeting())


@pytest.fixture
def record():
    return Recorded()


@pytest.fixture
def model(script, record):
    pair = replace(served(), target=replace(INFO, adapters=(SET,)))
    return Hosted(script, pair, Meters(record, MonotonicClock().now), adapter_store=Store())


@pytest.fixture
def http(model):
    return servicer(None, models=Models([model]))


async def load(http, name="mine", path="/adapters/mine", **fields):
    return await respond(http, call(LOAD, lora_name=name, lora_path=path, **fields))


async def test_the_model_of_a_request_may_be_an_adapter(http, script, record):
    status, reply = await whole(http, call(model="set"))
    assert (status, reply["model"]) == (200, "set")
    assert script.requests[-1].adapter == SET
    _, base = await whole(http, call(model="pair"))
    assert script.requests[-1].adapter is None
    assert base["system_fingerprint"] != reply["system_fingerprint"]
    counted = {key: value for key, value in record.values.items() if key[0].startswith("adapter_")}
    accepted = record["spec_decode_num_accepted_tokens_total"] / 2
    assert counted == {("adapter_draft_tokens_total", "set"): 6, ("adapter_accepted_tokens_total", "set"): accepted}


async def test_adapters_are_listed_with_their_model(http):
    await load(http)
    _, reply = await whole(http, call("/v1/models", "GET"))
    assert [(each["id"], each.get("parent")) for each in reply["data"]] == [
        ("pair", None),
        ("set", "pair"),
        ("mine", "pair"),
    ]
    _, one = await whole(http, call("/v1/models/mine", "GET"))
    assert one["parent"] == "pair"


async def test_an_adapter_is_loaded_used_and_unloaded(http, script):
    head, body = await load(http)
    assert (head.status, body) == (200, b"Success: LoRA adapter 'mine' added successfully.")
    await whole(http, call(model="mine"))
    assert script.requests[-1].adapter == Adapter("mine", "/adapters/mine", "sha256:01")
    head, body = await respond(http, call(UNLOAD, lora_name="mine", lora_int_id=1))
    assert (head.status, body) == (200, b"Success: LoRA adapter 'mine' removed successfully.")
    head, problem = await error(http, call(model="mine"))
    assert (head.status, problem["param"], problem["code"]) == (404, "model", "model_not_found")
    assert problem["message"] == "there is no model 'mine' here; this server has 'pair', 'set'"


async def test_what_another_orchestrator_has_loaded_is_known_after_a_look(http, model):
    model.adapter_store.adapters["theirs"] = Adapter("theirs", "/adapters/theirs", "sha256:02")
    assert (await error(http, call(model="theirs")))[0].status == 404
    await model.look_for_adapters()
    assert (await whole(http, call(model="theirs")))[0] == 200
    head, problem = await error(http, call(LOAD, lora_name="theirs", lora_path="/x"))
    assert (head.status, problem["param"]) == (400, "lora_name")


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"lora_path": "/broken"}, 400, "lora_path", "adapter 'new' in /broken: r must be in [1, 512], got 0"),
        ({"lora_path": "here"}, 400, "lora_path", "must be an absolute path"),
        ({"lora_name": "set"}, 400, "lora_name", "there is a model or an adapter 'set' already"),
        ({"lora_name": "pair"}, 400, "lora_name", "there is a model or an adapter 'pair' already"),
        ({"lora_name": ""}, 400, "lora_name", "1 to 256 printable characters"),
        ({"lora_name": None}, 400, "lora_name", "must be a valid string"),
        ({"load_inplace": True}, 400, "load_inplace", "unload the adapter first"),
        ({"base_model_name": "other"}, 404, "model", "there is no model 'other' here"),
        ({"base_model_name": "set"}, 400, "base_model_name", "must be a model, and 'set' is an adapter"),
        ({"lora_rank": 3}, 400, "lora_rank", "is not a field that this server knows"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_the_field(http, fields, status, param, message):
    given = {"lora_name": "new", "lora_path": "/adapters/new", **fields}
    head, problem = await error(http, call(LOAD, **given))
    assert (head.status, problem["param"]) == (status, param)
    assert message in problem["message"]
    assert (await whole(http, call(model="set")))[0] == 200, "others are served on"


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [("none", 404, "there is no adapter 'none' here"), ("set", 400, "the settings name it, in target.engine.adapters")],
)
async def test_what_cannot_be_unloaded_is_refused(http, name, status, message):
    head, problem = await error(http, call(UNLOAD, lora_name=name))
    assert head.status == status
    assert message in problem["message"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_the_setting_there_is_no_such_path(model, path):
    model.adapter_store = None
    head, problem = await error(
        servicer(None, models=Models([model])),
        call(path, lora_name="mine", **({"lora_path": "/a"} if path == LOAD else {})),
    )
    assert head.status == 404
    assert "http.load_adapters is off" in problem["message"]


async def test_only_post_loads(http):
    assert (await error(http, call(LOAD, "GET")))[0].status == 405
