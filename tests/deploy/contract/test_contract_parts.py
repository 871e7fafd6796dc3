"""Each field of the official clients' bodies, blocks, items and parts over a real socket: it arrives, or is ignored as
`parts.py` says, or is refused by its name. One that is new in a client fails here until it is listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

from tests.deploy.contract.bodies import fields_of
from tests.deploy.contract.fields import PAIR
from tests.deploy.contract.parts import AS_HEADERS, BODIES, KINDS, PLACES, Place, types_of
from tests.deploy.contract.test_contract_bodies import TEMPLATE, Server
from tests.vocabularies import as_product, byte_level


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(replace(PAIR, tokenizer=as_product(byte_level(), TEMPLATE))).running() as running:
        yield running


def cases(table: str) -> list[Any]:
    return [
        pytest.param(place, field, value, id=f"{place.official.__name__}-{index}-{field}")
        for index, place in enumerate(PLACES)
        for field, value in getattr(place, table).items()
    ]


@pytest.mark.parametrize("path", BODIES)
def test_a_body_has_all_fields_of_the_official_client(path):
    here = {name.partition(".")[0] for name in fields_of(path)}
    assert {*get_type_hints(BODIES[path])} - AS_HEADERS - here == set()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.path}-{place.official.__name__}")
def test_no_field_of_a_part_is_left_out(place: Place):
    listed = {*place.arrives, *place.ignored, *place.refused, "type"}
    assert {*get_type_hints(place.official)} - listed == set()


@pytest.mark.parametrize(("place", "field", "value"), cases("arrives"))
def test_a_field_of_a_part_arrives(server, place, field, value):
    found, plain = (server.outcome(place.path, body) for body in (place.body(**{field: value}), place.body()))
    assert (found[0], plain[0]) == (200, 200), (found, plain)
    assert found[2] != plain[2]


@pytest.mark.parametrize(("place", "field", "value"), cases("ignored"))
def test_a_field_of_a_part_that_is_ignored_changes_nothing(server, place, field, value):
    found, plain = (server.outcome(place.path, body) for body in (place.body(**{field: value}), place.body()))
    assert (found[0], plain[0]) == (200, 200), (found, plain)
    assert found[2] == plain[2]


@pytest.mark.parametrize(("place", "field", "value"), cases("refused"))
def test_a_field_of_a_part_that_is_not_supported_is_refused_by_its_name(server, place, field, value):
    status, reply, requests = server.outcome(place.path, place.body(**{field: value}))
    message = re.sub(r"\[\d+\]", "", json.loads(reply)["error"]["message"])
    assert (status, requests) == (400, [])
    assert message.startswith(f"{place.name}.{field}: "), message
    assert len(message) > len(f"{place.name}.{field}: is not supported"), "and says why"


@pytest.mark.parametrize(("path", "field", "official", "around", "taken"), KINDS, ids=[each[1] for each in KINDS])
def test_a_part_of_another_kind_is_refused_by_its_type(server, path, field, official, around, taken):
    kinds = types_of(official)
    assert set(kinds) >= taken
    for kind in kinds:
        status, reply, requests = server.outcome(path, around({"type": kind}))
        if kind not in taken:
            message = json.loads(reply)["error"]["message"]
            assert (status, requests) == (400, []), kind
            assert message.startswith(f"{field}: must be "), message
