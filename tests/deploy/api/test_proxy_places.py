"""What a proxy counts of its own refusals."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Overloaded
from deploy.api import proxy_places
from deploy.metrics import REQUEST_FAILURE


def test_refusals_of_a_model_are_counted_by_one_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is made registers its metrics with Ray, while the proxy is full."""
    made: list[str] = []
    counted: list[tuple[str, Any]] = []

    class Recorder:
        def __init__(self, model_name: str, catalogue: Any) -> None:
            made.append(model_name)
            self._model_name, self._catalogue = model_name, catalogue

        def __call__(self, metric: Any, value: float, label: str) -> None:
            assert metric in self._catalogue
            counted.append((self._model_name, (metric, value, label)))

    monkeypatch.setattr(proxy_places, "ServeRecorder", Recorder)
    names = [f"{__name__} {each}" for each in "aab"]  # recorders stay: no other test may get these
    for name in names:
        proxy_places._count_refusal(name)
    assert made == [names[0], names[2]]
    assert counted == [(name, (REQUEST_FAILURE, 1, Overloaded.status)) for name in names]
