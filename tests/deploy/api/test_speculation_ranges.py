"""A number outside its range, or not whole, is refused by the path that the caller gave it under."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest
from deploy.api.given import Given
from deploy.api.speculation import _parameters


@pytest.mark.parametrize(("name", "value"), [("max_draft_tokens", 0.5), ("max_draft_tokens", 65), ("lenience", 0.0)])
def test_the_path_of_the_field_is_named(name, value):
    with pytest.raises(InvalidRequest) as caught:
        _parameters(Given(token_ids=[5], **{name: value}))
    assert caught.value.field == f"speculation.{name}"
