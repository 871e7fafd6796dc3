"""A proxy counts its own refusals."""

from __future__ import annotations

from typing import Any

import pytest

from core.errors import Overloaded
from deploy.api.hosted import Hosted, Models
from deploy.api.proxy import places as proxy_places
from deploy.metrics import REQUEST_FAILURE
from deploy.metrics.meters import Meters
from tests.deploy.grpc.rpc import Recorded, Script, served


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


def test_a_proxy_promises_the_wait_for_a_place_once_all_are_taken() -> None:
    """It refuses no call before, and in a burst it hears of nothing new."""
    script = Script()
    script.full_wait_s = 11.0
    models = Models([Hosted(script, served(), Meters(Recorded(), lambda: 0.0))])
    assert models.places.retry_after_s == 11.0
