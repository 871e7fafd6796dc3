"""The example of docs/howto/add-a-backend.md passes the test that it comes with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import python_blocks


def test_the_pages_backend_passes_the_pages_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, test = python_blocks("howto/add-a-backend.md")
    module = ModuleType("workers.runtime.backends.one_thread")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(backend, vars(module))
    of_test: dict[str, Any] = {}
    exec(test, of_test)
    of_test["test_steps_of_all_kinds_are_the_models_own"](tmp_path, monkeypatch)
