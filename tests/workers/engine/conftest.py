"""Fixtures of the engines' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoints import read_once, write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a tiny Llama, which no test changes."""
    return str(write("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True, scope="module")
def _each_model_is_read_once() -> Iterator[None]:
    """Most tests here start an engine or two, of few checkpoints."""
    with read_once():
        yield
