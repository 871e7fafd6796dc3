"""instructor: every mode in which the output is held to something, whole and in partial objects, by both APIs."""

import contextlib
from typing import Literal

import anthropic
import instructor
import openai
from checks import CITIES, KEY, MODEL, URL, run
from instructor import Mode
from instructor.core.exceptions import IncompleteOutputException
from pydantic import BaseModel, ConfigDict


class Place(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]


class Anything(BaseModel):
    """Any object."""


HELD = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
)
MESSAGES = [{"role": "user", "content": "where?"}]
GIVEN = {"messages": MESSAGES, "max_retries": 0, "temperature": 0.0}
by_openai = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
by_anthropic = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)


def client_of(mode):
    return instructor.from_openai(by_openai, mode=mode, model=MODEL)


def check_each_mode_that_holds_the_output():
    for mode in HELD:
        assert client_of(mode).create(response_model=Place, max_tokens=80, **GIVEN).city in CITIES, mode


def check_a_reply_comes_with_its_object():
    for mode in HELD:
        place, reply = client_of(mode).create_with_completion(response_model=Place, max_tokens=80, **GIVEN)
        assert place.city in CITIES
        assert reply.usage.total_tokens > 0


def check_partial_objects_stream():
    for mode in HELD:
        *_, last = client_of(mode).create_partial(response_model=Place, max_tokens=80, **GIVEN)
        assert last.city in CITIES, mode


def check_an_output_that_was_cut_is_said_to_be():
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.JSON):
        try:
            client_of(mode).create(response_model=Place, max_tokens=2, **GIVEN)
        except IncompleteOutputException:
            continue
        raise AssertionError(mode)


def check_any_object():
    """A model that writes nonsense need not come to its end."""
    with contextlib.suppress(IncompleteOutputException):
        client_of(Mode.JSON).create(response_model=Anything, max_tokens=200, **GIVEN)


def check_anthropic_s_tools():
    client = instructor.from_anthropic(by_anthropic, mode=Mode.ANTHROPIC_TOOLS)
    place = client.create(model=MODEL, response_model=Place, max_tokens=80, **GIVEN)
    assert place.city in CITIES
    *_, last = client.create_partial(model=MODEL, response_model=Place, max_tokens=80, **GIVEN)
    assert last.city in CITIES


run(globals())
