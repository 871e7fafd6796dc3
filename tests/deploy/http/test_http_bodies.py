"""Whatever a body holds, it becomes requests or is refused with the name of a field: nothing else is ever raised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_http_translate import ChatBody, CompletionBody, requests_of

from core.errors import InvalidRequest
from deploy.http.anthropic import MessagesBody
from deploy.http.openai import ResponsesBody

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**64, 1e-320])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({}, optional=dict.fromkeys(("role", "content", "name", "tool_calls"), VALUES))


def bodies(kind):
    names = sorted({*kind.model_fields} - {"prompt", "messages"})
    prompt = {"prompt": st.just("say") | VALUES} if kind is CompletionBody else {"messages": st.lists(MESSAGE) | VALUES}
    speculation = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("max_draft_tokens", "policy", "pipelining"), VALUES)
    )
    others = {**dict.fromkeys(names, VALUES), "speculation": speculation}
    return st.lists(st.sampled_from(names), max_size=3).flatmap(
        lambda some: st.fixed_dictionaries({**prompt, **{name: others[name] for name in some}})
    )


def refusal(kind, body):
    try:
        assert requests_of(kind, body)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(data=st.data())
def test_a_body_becomes_requests_or_names_what_is_wrong(kind, data):
    error = refusal(kind, data.draw(bodies(kind)))
    assert error is None or (error.field and error.problem)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(data=st.data())
def test_bytes_that_were_changed_on_their_way_are_no_trouble(kind, data):
    encoded = bytearray(json.dumps(data.draw(bodies(kind))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    error = refusal(kind, bytes(encoded))
    assert error is None or (error.field and error.problem)


ITEM = st.dictionaries(
    st.sampled_from(("type", "role", "content", "name", "arguments", "call_id", "text", "id")), VALUES
)
KINDS = st.sampled_from(
    ("message", "function_call", "function_call_output", "reasoning", "text", "tool_use", "tool_result")
)
TYPED = st.builds(lambda item, kind, role: {"role": role, **item, "type": kind}, ITEM, KINDS, st.just("user"))
SAID = st.builds(
    lambda role, blocks: {"role": role, "content": blocks}, st.sampled_from(("user", "assistant")), st.lists(TYPED)
)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "prompt"), [(ResponsesBody, "input"), (MessagesBody, "messages")])
@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 2)
def test_so_does_a_body_of_the_other_apis(kind, prompt, data):
    names = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), max_size=3))
    items = st.lists(TYPED if kind is ResponsesBody else SAID, max_size=3)
    body = {"max_tokens": 5} if kind is MessagesBody else {}
    body |= {name: data.draw(VALUES) for name in names} | {prompt: data.draw(items | VALUES)}
    error = refusal(kind, body)
    assert error is None or (error.field and error.problem)


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"messages": [1] * 4000}, 2),
        ({"messages": [{"role": "user", "content": "say"}] * 5000}, 2),
        ({"messages": [], "logit_bias": {str(token): "x" for token in range(5000)}}, 2),
        ({"messages": [], "stop_token_ids": ["x"] * 5000}, 2),
    ],
    ids=["wrong messages", "many messages", "many biases", "wrong ids"],
)
def test_the_number_of_errors_that_are_made_is_bounded(body, most):
    """Each costs an object while the event loop stands still."""
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= most
