"""What the tests of engines share."""

from __future__ import annotations

import pytest

from tests.checkpoints import write


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The directory of a tiny Llama, which no test changes."""
    return str(write("llama", tmp_path_factory.mktemp("llama")))
