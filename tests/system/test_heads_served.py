"""The running service with a head on a draft engine. Its death, and its target's, change no token; it guesses again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
import ray
from local import DEMO, request, system
from served import deployed_for

from bench.harness.probe import engine_of
from core.config import SpeculationConfig
from deploy.settings import demo_config
from outrider_client import Client
from tests import eagle

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT, NUM_TOKENS, NUM_GUESSABLE, MAX_WAIT_S = "def parse_args(self, args):\n    ", 96, 4, 120.0
FIELDS = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
WAYS = {"draft": {"temperature": 0.0}, "target": {"temperature": 0.8, "seed": 17}}
"""By the engine that dies meanwhile."""


async def plain_output():
    async with system(draft=None) as served:
        return await served.tokens(request(served.tokenizer.encode(PROMPT), NUM_TOKENS))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A head that guesses the four commonest tokens of the greedy output, all of which are verified in each round."""
    commonest = [token for token, _ in Counter(asyncio.run(plain_output())).most_common(NUM_GUESSABLE)]
    head = eagle.sure_head_at(tmp_path_factory.mktemp("head"), DEMO / "target", commonest)
    demo, model = demo_config(), str(DEMO / "target")
    speculation = SpeculationConfig(
        policy="static_tree", max_draft_tokens=1, max_block_tokens=NUM_GUESSABLE, guessers=("draft",)
    )
    target = replace(demo.target, engine=replace(demo.target.engine, feature_layers=tuple(eagle.LAYER_IDS)))
    draft = replace(demo.draft, engine=replace(demo.draft.engine, model=model, head=head))
    return replace(demo, target=target, draft=draft, speculation=speculation)


def until_it_guesses(client, plain, way):
    """Complete until some guesses are right: an engine that has died is replaced within seconds."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < deadline_s:
        output = client.generate(PROMPT, **way, **FIELDS)
        assert output.token_ids == plain.token_ids
        if sum(output.guessed):
            return
    pytest.fail("no guess of the head was right")


def test_a_head_and_its_target_die_and_the_head_guesses_again(config, cluster):
    with deployed_for(config, cluster) as server, Client(server.address) as client:
        for role, way in WAYS.items():
            plain = client.generate(PROMPT, **way, **FIELDS, max_draft_tokens=0)
            until_it_guesses(client, plain, way)
            chunks = client.stream(PROMPT, **way, **FIELDS)
            tokens = list(next(chunks).token_ids)
            ray.kill(asyncio.run(engine_of(role)))
            tokens += [token for chunk in chunks for token in chunk.token_ids]
            assert tuple(tokens) == plain.token_ids
            until_it_guesses(client, plain, way)
