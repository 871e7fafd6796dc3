"""Whatever a body holds, it becomes requests or is refused with the name of a field: nothing else is ever raised."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_http_translate import ChatBody, CompletionBody, requests_of

from core.errors import InvalidRequest

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


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(data=st.data())
@settings(max_examples=200)
def test_a_body_becomes_requests_or_names_what_is_wrong(kind, data):
    error = refusal(kind, data.draw(bodies(kind)))
    assert error is None or (error.field and error.problem)


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(data=st.data())
@settings(max_examples=200)
def test_bytes_that_were_changed_on_their_way_are_no_trouble(kind, data):
    encoded = bytearray(json.dumps(data.draw(bodies(kind))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    error = refusal(kind, bytes(encoded))
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
