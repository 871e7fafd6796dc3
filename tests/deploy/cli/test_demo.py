"""The demo asks for a prompt or a chat, never both, which a server refuses."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.cli.demo import EXAMPLES, FIRST_EXAMPLES, Example, _job


class FakeClient:
    """Keeps the prompt and the fields of each call."""

    def __init__(self) -> None:
        self.asked: list[tuple[str | None, dict[str, Any]]] = []

    def stream(self, prompt: str | None = None, **fields: Any) -> None:
        self.asked.append((prompt, fields))


@pytest.mark.parametrize("example", [*EXAMPLES, *FIRST_EXAMPLES], ids=lambda each: each.title)
def test_an_example_is_a_prompt_or_a_chat(example: Example) -> None:
    client = FakeClient()
    _job(example, 8).stream(client)  # type: ignore[arg-type]
    ((prompt, fields),) = client.asked
    assert (prompt is None) == ("messages" in fields)
