"""A draft follows the link that names its checkpoint, and stays with the last one that could be loaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from ray import serve

from core.config import DraftConfig, EngineConfig, Limits, TargetConfig
from deploy.app import worker
from deploy.serve.deployments import DraftWorker, EngineWorker, TargetWorker
from deploy.serve.followed import FollowedCheckpoint
from deploy.serve.leases import ServeLeases
from deploy.serve.routing import draft_router, target_router
from tests.deploy.fake_engines import FakeDraftActor, FakeTargetActor, Front

APPLICATION = "followed"
CONFIG = EngineConfig("any", max_step_tokens=7)


@pytest.fixture
def link(tmp_path):
    for name in ("first", "second", "broken"):
        (tmp_path / name).mkdir()
    path = tmp_path / "current"
    switch(path, "first")
    return path


def switch(link, name):
    link.unlink(missing_ok=True)
    link.symlink_to(link.parent / name)


def loaded(link, *, follows_link=True):
    checkpoint = FollowedCheckpoint(str(link), follows_link=follows_link)
    checkpoint.has_loaded(checkpoint.settings(CONFIG))
    return checkpoint


def test_a_link_is_followed_once_it_is_switched(link):
    checkpoint = loaded(link)
    assert checkpoint.settings(CONFIG) == replace(CONFIG, model=str(link.parent / "first"))
    assert not checkpoint.has_moved
    switch(link, "second")
    assert checkpoint.has_moved
    checkpoint.has_loaded(checkpoint.settings(CONFIG))
    assert checkpoint.settings(CONFIG).model == str(link.parent / "second")
    assert not checkpoint.has_moved


def test_a_checkpoint_that_cannot_be_loaded_is_left_until_the_link_names_another(link):
    checkpoint = loaded(link)
    switch(link, "broken")
    assert checkpoint.has_moved
    checkpoint.has_failed(checkpoint.settings(CONFIG))
    assert not checkpoint.has_moved
    assert checkpoint.settings(CONFIG).model == str(link.parent / "first")
    switch(link, "second")
    assert checkpoint.has_moved
    assert checkpoint.settings(CONFIG).model == str(link.parent / "second")


def test_a_checkpoint_that_was_left_is_tried_again_once_the_link_named_another(link):
    checkpoint = loaded(link)
    switch(link, "broken")
    checkpoint.has_failed(checkpoint.settings(CONFIG))
    switch(link, "first")
    assert not checkpoint.has_moved
    switch(link, "broken")
    assert checkpoint.has_moved
    assert checkpoint.settings(CONFIG).model == str(link.parent / "broken")


def test_a_first_checkpoint_that_cannot_be_loaded_is_tried_again(link):
    checkpoint = FollowedCheckpoint(str(link), follows_link=True)
    checkpoint.has_failed(checkpoint.settings(CONFIG))
    assert checkpoint.settings(CONFIG).model == str(link.parent / "first")


def test_without_the_setting_a_link_is_a_path_like_any_other(link):
    checkpoint = loaded(link, follows_link=False)
    switch(link, "second")
    assert not checkpoint.has_moved
    assert checkpoint.settings(CONFIG) == CONFIG


@pytest.mark.parametrize(("name", "findings"), [("first", "measured"), ("second", None)])
async def test_what_was_measured_of_one_checkpoint_is_not_handed_to_another(link, name, findings):
    checkpoint, load = loaded(link), AsyncMock()
    switch(link, name)
    current = SimpleNamespace(
        kill=Mock(), findings="measured", config_of_next=AsyncMock(return_value=CONFIG), load=load, engine_id="e"
    )
    worker_ = SimpleNamespace(
        _current=current, _findings="measured", _checkpoint=checkpoint, _begin_life=lambda _: current, _replica_id="r"
    )
    assert await EngineWorker._has_loaded_another(worker_)
    load.assert_awaited_once_with(findings)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster_for_fakes")
async def test_a_replica_replaces_its_engine_and_keeps_the_old_checkpoint_if_the_new_one_is_broken(link):
    target, draft = TargetConfig(EngineConfig("fake")), DraftConfig(EngineConfig(str(link)), follows_link=True)
    targets = worker(TargetWorker, target).options(request_router_config=target_router())
    drafts = worker(DraftWorker, draft).options(request_router_config=draft_router())
    front = serve.deployment(Front).bind(
        targets.bind(target, "pair", FakeTargetActor), drafts.bind(draft, "pair", 64, FakeDraftActor)
    )
    serve.run(front, name=APPLICATION)
    handles = [serve.get_deployment_handle(name, APPLICATION) for name in ("target", "draft")]
    leases = ServeLeases(handles[0], [(handles[1], None)], Limits(lease_timeout_s=120.0))
    try:
        engines = [await _engine_id(leases)]
        for name, model in (("second", "second"), ("broken", "second"), ("first", "first")):
            switch(link, name)
            engines.append(await _another(leases, engines))
            assert await _served(leases) == str(link.parent / model)
    finally:
        serve.delete(APPLICATION)


async def _engine_id(leases):
    lease = await leases.take_draft("to look")
    lease.release()
    return lease.engine_id


async def _another(leases, known):
    while (found := await _engine_id(leases)) in known:  # noqa: ASYNC110  the event happens in another process
        await asyncio.sleep(0.2)
    return found


async def _served(leases):
    lease = await leases.take_draft("to look")
    lease.release()
    return await lease.port._engine.model.remote()
