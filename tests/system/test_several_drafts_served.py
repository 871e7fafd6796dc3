"""The running service with two drafts: each is a deployment of its own, and the death of one leaves the other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import ray
from local import DEMO
from served import MAX_TRIES, deployed_for

from bench.harness.probe import engine_of
from core.config import DraftConfig, SpeculationConfig
from deploy.settings import demo_config
from outrider_client import Client

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = "def parse_args(self, args):\n    "
FIELDS = {"max_tokens": 64, "ignore_eos": True}
WAYS = {"draft": {"temperature": 0.0}, "draft2": {"temperature": 0.8, "seed": 5}}
"""By the draft that dies meanwhile."""


@pytest.fixture(scope="module")
def config():
    """The second draft is a copy of the target: it guesses what the first one misses."""
    demo = demo_config()
    engine = replace(demo.draft.engine, model=str(DEMO / "target"))
    speculation = SpeculationConfig(policy="static_tree", max_block_tokens=16, guessers=("draft",))
    return replace(demo, extra_drafts=(DraftConfig(engine),), speculation=speculation)


@pytest.mark.ci
def test_two_drafts_change_no_token_and_each_may_die(config, cluster):
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        for role, way in WAYS.items():
            plain = client.generate(PROMPT, **way, **FIELDS, max_draft_tokens=0)
            for _ in range(MAX_TRIES):
                assert client.generate(PROMPT, **way, **FIELDS).token_ids == plain.token_ids
                if has_stepped := asyncio.run(server.stats("draft2")).num_steps > 0:
                    break
            assert has_stepped, "both have drafted"
            chunks = client.stream(PROMPT, **way, **FIELDS)
            tokens = list(next(chunks).token_ids)
            ray.kill(asyncio.run(engine_of(role)))
            tokens += [token for chunk in chunks for token in chunk.token_ids]
            assert tuple(tokens) == plain.token_ids
