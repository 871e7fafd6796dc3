"""A request's service tier stands for a priority, which its caller's key has to allow, in each language of the API."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import anthropic
import openai
import pytest

from core.config import Limits, ServiceConfig, ServiceTiers
from core.errors import ConfigError, InvalidRequest
from deploy.api.authentication import Caller, KeyLimits
from deploy.api.given import SERVICE_TIERS, Given, ServiceTier
from deploy.api.request import priority_of
from deploy.grpc.translate import TIERS
from outrider_client.records import ServiceTier as Named
from protos.outrider.v1 import generation_pb2 as pb
from tests.deploy.grpc.rpc import CONFIG, Script
from tests.deploy.http.clients import by_anthropic, by_openai, said

OPEN = replace(CONFIG, limits=Limits(max_priority=-20))
HELLO = [{"role": "user", "content": "say"}]


def given(tier: ServiceTier | None, number: int = 0, allowed: int | None = None) -> Given:
    caller = Caller("a", KeyLimits(max_priority=allowed))
    return Given(token_ids=[5], service_tier=tier, priority=number, caller=caller)


def test_proto_and_client_have_the_same_tiers():
    names = ["SERVICE_TIER_UNSPECIFIED", *(f"SERVICE_TIER_{each.upper()}" for each in SERVICE_TIERS)]
    assert pb.ServiceTier.keys() == names
    assert tuple(TIERS.values()) == SERVICE_TIERS == get_args(Named)


@pytest.mark.parametrize(
    ("tier", "tiers", "expected"),
    [
        (None, ServiceTiers(), 0),
        ("default", ServiceTiers(flex=7, priority=-7), 0),
        ("flex", ServiceTiers(), 10),
        ("priority", ServiceTiers(), -10),
        ("flex", ServiceTiers(flex=3), 3),
        ("priority", ServiceTiers(priority=-3), -3),
    ],
)
def test_a_tier_stands_for_the_priority_that_the_settings_say(tier, tiers, expected):
    assert priority_of(given(tier), replace(OPEN, tiers=tiers)) == expected


def test_a_tier_is_allowed_by_the_callers_key_else_by_the_service():
    assert priority_of(given("priority"), OPEN) == -10
    closed: ServiceConfig = replace(OPEN, limits=Limits())
    assert priority_of(given("priority", allowed=-10), closed) == -10
    for config, allowed, source in (
        (closed, None, "at least 0, the most urgent by the setting limits.max_priority, got priority"),
        (OPEN, -9, "at least -9, the most urgent by max_priority of this caller's key, got priority"),
    ):
        with pytest.raises(InvalidRequest, match=source) as caught:
            priority_of(given("priority", allowed=allowed), config)
        assert caught.value.field == "service_tier"
    with pytest.raises(InvalidRequest, match="got default, which is 0"):
        priority_of(given("default", allowed=5), OPEN)
    assert priority_of(given("flex", allowed=5), OPEN) == 10


@pytest.mark.parametrize(("tier", "number", "field"), [("priority", 0, "service_tier"), (None, -1, "priority")])
def test_a_key_that_allows_nothing_urgent_allows_less_than_the_service(tier, number, field):
    """0 is a limit, and not the lack of one."""
    with pytest.raises(InvalidRequest, match=r"at least 0, .* of this caller's key") as caught:
        priority_of(given(tier, number, allowed=0), OPEN)
    assert caught.value.field == field


def test_there_is_one_priority_to_a_request():
    with pytest.raises(InvalidRequest, match="beside service_tier") as caught:
        priority_of(given("default", 3), OPEN)
    assert caught.value.field == "priority"


@pytest.mark.parametrize("wrong", [{"flex": -1}, {"flex": 2**31}, {"priority": 1}, {"priority": -(2**31) - 1}])
def test_a_tier_that_would_be_served_at_the_wrong_end_is_no_setting(wrong):
    with pytest.raises(ConfigError, match="must be in"):
        ServiceTiers(**wrong)


@pytest.mark.parametrize(
    ("asked", "served", "number"),
    [("auto", "default", 0), ("default", "default", 0), ("flex", "flex", 10), ("priority", "priority", -10)],
)
async def test_openai_s_replies_name_the_tier_that_served_them(asked, served, number):
    script = Script(*said("hel", "lo"))
    async with by_openai(script) as client:
        chat = {"model": "pair", "messages": HELLO, "service_tier": asked}
        whole = await client.chat.completions.create(**chat)
        pieces = [each async for each in await client.chat.completions.create(**chat, stream=True)]
        response = await client.responses.create(model="pair", input="say", service_tier=asked)
        body = {"service_tier": asked}
        completion = await client.completions.create(model="pair", prompt="say", extra_body=body)
    assert {each.service_tier for each in (whole, *pieces, response)} == {served}
    assert completion.model_extra["service_tier"] == served
    assert [each.priority for each in script.requests] == [number] * 4


async def test_who_names_no_tier_is_served_by_the_default_one():
    """So does `auto`, beside which a priority may stand."""
    script, chat = Script(*said("hel", "lo")), {"model": "pair", "messages": HELLO, "extra_body": {"priority": 3}}
    async with by_openai(script) as client:
        whole = await client.chat.completions.create(**chat)
        auto = await client.chat.completions.create(**chat, service_tier="auto")
        response = await client.responses.create(model="pair", input="say")
    tiers = [each.service_tier for each in (whole, auto, response)]
    assert tiers == [None, "default", "default"], "as OpenAI has it: where it was asked for"
    assert [each.priority for each in script.requests] == [3, 3, 0]


@pytest.mark.parametrize("wrong", ["scale", "fast", "", 5])
async def test_another_tier_of_openai_s_is_refused_by_the_field(wrong):
    async with by_openai(Script()) as client:
        with pytest.raises(openai.BadRequestError, match="'auto', 'default', 'flex' or 'priority'") as caught:
            await client.chat.completions.create(model="pair", messages=HELLO, service_tier=wrong)
        assert caught.value.param == "service_tier"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="pair", input="say", service_tier=wrong)
    assert caught.value.param == "service_tier"


async def test_anthropic_s_tiers_are_the_same_here():
    script = Script(*said("hel", "lo"))
    async with by_anthropic(script) as client:
        asked = {"model": "pair", "max_tokens": 50, "messages": HELLO}
        for tier in ("auto", "standard_only"):
            message = await client.messages.create(**asked, service_tier=tier)
            assert message.usage.service_tier == "standard"
        with pytest.raises(anthropic.BadRequestError, match="service_tier: must be 'auto' or 'standard_only'"):
            await client.messages.create(**asked, service_tier="priority")
    assert [each.priority for each in script.requests] == [0, 0]
