"""A target whose sessions have no room for their blocks in one pass is told of at start."""

from __future__ import annotations

import logging

import pytest

from core.config import DraftConfig, EngineConfig, ServiceConfig, SpeculationConfig, TargetConfig
from core.config.scaling import TargetScaling
from deploy.app import build, excess_rows


def service(*, device="cuda", sessions=32.0, step=2048, block=32, is_scaled=True):
    scaling = TargetScaling(max_replicas=2, sessions=sessions) if is_scaled else None
    engine = EngineConfig("target", device=device, max_step_tokens=step)
    target = TargetConfig(engine, num_gpus=1, autoscaling=scaling)
    draft = DraftConfig(EngineConfig("draft"))
    return ServiceConfig(target, draft, model_name="m", speculation=SpeculationConfig(max_block_tokens=block))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"step": 1056}, None),
        ({"step": 1055}, "1056 rows take 2 passes"),
        ({"step": 512}, "1056 rows take 3 passes"),
        ({"sessions": 62.5}, "2079 rows take 2 passes"),
        ({"block": 64}, "2080 rows take 2 passes"),
        ({"step": 512, "device": "cpu"}, None),
        ({"step": 512, "is_scaled": False}, None),
    ],
)
def test_rows_that_have_no_room_are_counted(settings, words):
    found = excess_rows(service(**settings))
    assert (found is None) == (words is None)
    assert (words or "") in (found or "")


@pytest.mark.parametrize(("step", "is_told"), [(512, True), (2048, False)])
def test_it_is_told_once_where_the_application_is_built(caplog, step, is_told):
    with caplog.at_level(logging.WARNING):
        build(service(step=step))
    told = [record.message for record in caplog.records if "max_step_tokens" in record.message]
    assert len(told) == is_told
    assert not told or told[0].startswith("m: target.engine.max_step_tokens (512)")
