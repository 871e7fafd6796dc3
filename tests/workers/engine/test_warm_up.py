"""An engine prepares at its start what no request should pay for."""

from __future__ import annotations

import torch

from tests.workers.engine.driving import EPOCH
from workers.engine import base
from workers.engine.target import TargetEngine


def test_the_kernel_of_noise_is_looked_for_on_the_device_that_logits_are_on(checkpoint, monkeypatch):
    """A tensor there names it `cuda:0`, where settings may say `cuda`."""
    asked = []
    monkeypatch.setattr(base, "find_noise_kernel", asked.append)
    config = base.EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512)
    engine = TargetEngine.load(config, EPOCH, lambda _: None)
    monkeypatch.setattr(engine._runtime.cache, "device", torch.device("cuda"))
    engine._runtime.warm_up = lambda *_: base.Findings("here", False, None, ())
    assert asked == []
    engine.warm_up(lambda _: None)
    assert asked == [torch.device("cpu")]
