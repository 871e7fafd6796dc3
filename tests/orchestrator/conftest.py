"""Fixtures of the orchestrator's tests."""

from __future__ import annotations

import pytest

from tests.orchestrator.fakes import FakeTokenizer


@pytest.fixture
def tokenizer():
    return FakeTokenizer()
