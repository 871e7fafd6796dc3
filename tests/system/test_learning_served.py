"""The running service while the link of its draft is switched: a stream in progress has the same tokens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from local import DEMO, noisy_copy
from served import deployed_for

from bench.harness.probe import engine_of
from core.config import SpeculationConfig
from deploy.settings import demo_config
from outrider_client import Client
from workers.live import files_after, read_kept

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = "def parse_args(self, args):\n    "
FIELDS = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 5}
MAX_WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("learning")
    (path / "noisy").mkdir()
    noisy_copy(DEMO / "draft", path / "noisy")
    (path / "current").symlink_to(DEMO / "draft")
    return path


def switch(folder, to):
    (folder / "new").symlink_to(to)
    (folder / "new").rename(folder / "current")


def test_a_draft_is_swapped_under_a_stream(folder, cluster):
    demo = demo_config([f"target.engine.learning_buffer={folder / 'buffer'}"])
    draft = replace(demo.draft, engine=replace(demo.draft.engine, model=str(folder / "current")), follows_link=True)
    speculation = SpeculationConfig(policy="static", guessers=("draft",))
    config = replace(demo, draft=draft, speculation=speculation)
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        plain = client.generate(PROMPT, **FIELDS, max_draft_tokens=0, learning=False)
        first, tokens = epoch(), []
        chunks = client.stream(PROMPT, **FIELDS)
        tokens += next(chunks).token_ids
        switch(folder, folder / "noisy")
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert tuple(tokens) == plain.token_ids
        end_s = time.monotonic() + MAX_WAIT_S
        while epoch() in (first, None):
            assert time.monotonic() < end_s
            assert client.generate(PROMPT, **FIELDS).token_ids == plain.token_ids
        assert client.generate(PROMPT, **FIELDS).token_ids == plain.token_ids
        while not (files := files_after(folder / "buffer")):
            assert time.monotonic() < end_s
            time.sleep(0.5)
    assert all(text.num_chosen for text in read_kept(files))


def epoch():
    """Epoch of the draft's engine; None while it loads."""
    try:
        return asyncio.run(engine_of("draft"))._actor_id
    except RuntimeError:
        return None
