"""The MTP layer of the target's checkpoint guesses at the target's engine or at a draft's: no token changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from local import request, system

from core.config import SpeculationConfig
from core.records import Sampling, Verification
from tests import mtp
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

NUM_TOKENS = 24
PROMPTS = [[5, 17, 99, 4, 200, 31, 8], [77], [(7 * token) % 250 for token in range(40)]]
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "seeded": Sampling(temperature=0.9, seed=17)}
TREE = SpeculationConfig(policy="static_tree", max_block_tokens=4, draft_timeout_s=30.0)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "qwen3_next"])
def written(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    mtp.write(request.param, path)
    return path


def places(path):
    return {
        "head": {"draft": None, "targets": {"head": str(path)}},
        "draft": {"draft": path, "drafts": {"head": str(path)}, "targets": {"feature_layers": (-1,)}},
    }


async def streams(served):
    """Tokens and sources of all prompts by each sampling, side by side: they share their steps, which cost the same
    for one."""
    jobs = [
        request(prompt, NUM_TOKENS, sampling=sampling, verification=Verification.COUPLED)
        for sampling in SAMPLINGS.values()
        for prompt in PROMPTS
    ]
    chunks = await asyncio.gather(*map(served.complete, jobs))
    return [[token for chunk in each for token in chunk.token_ids] for each in chunks], [
        source for each in chunks for source in each[-1].stats.sources
    ]


async def test_no_token_changes(written):
    """The layer is random, so its guesses are mostly wrong: each is verified all the same, pipelined and in turn."""
    async with system(written, None) as served:
        plain, _ = await streams(served)
    for source, place in places(written).items():
        for is_pipelined in (True, False):
            speculation = replace(TREE, guessers=(source,), pipelining=is_pipelined)
            async with system(written, speculation=speculation, is_patient=True, **place) as served:
                tokens, sources = await streams(served)
                await served.check_nothing_is_held()
            assert tokens == plain
            assert {each.name for each in sources} == {source}
            assert all(each.num_drafted_tokens > 0 and each.num_failures == 0 for each in sources)


@pytest.mark.parametrize("replaced", ["target", "draft"])
async def test_a_new_engine_goes_on_where_another_stopped(tmp_path, replaced):
    mtp.write("deepseek_v3", tmp_path)
    source = "head" if replaced == "target" else "draft"
    place, kind = places(tmp_path)[source], TargetEngine if replaced == "target" else DraftEngine
    asked = request(PROMPTS[0], NUM_TOKENS, sampling=SAMPLINGS["seeded"])
    async with system(tmp_path, None) as served:
        plain = await served.tokens(asked)
    async with system(tmp_path, speculation=replace(TREE, guessers=(source,)), **place) as served:
        tokens, has_restarted = [], False
        async for chunk in served.service.generate(asked):
            tokens += chunk.token_ids
            if not has_restarted and len(tokens) >= 8:
                has_restarted = True
                config, others = served.leases.engines[replaced]._config, (64,) if kind is DraftEngine else ()
                await served.leases.replace_engine(replaced, kind.load(config, 9, *others, lambda _: None))
        assert has_restarted
        assert tokens == plain
        await served.check_nothing_is_held()
