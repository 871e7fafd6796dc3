"""What the tests of the orchestrator share."""

from __future__ import annotations

import pytest

from tests.orchestrator.fakes import FakeTokenizer


@pytest.fixture
def tokenizer():
    return FakeTokenizer()
