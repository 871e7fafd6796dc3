"""A draft that is some of the target's own layers changes no token, drafts in trees and draws, and is worth having."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local import DEMO, NEVER_LEFT, request, system

from core.config import SpeculationConfig
from core.records import Sampling, Verification

PROMPT = "def parse_args(self, args):\n    "
TREES = SpeculationConfig(policy="static_tree", max_block_tokens=12, draft_timeout_s=30.0, breaker_rounds=NEVER_LEFT)


@pytest.mark.parametrize("layers", [(0, 1, 2, 5), pytest.param((0,), marks=pytest.mark.ci)], ids=str)
async def test_greedy_and_seeded_tokens_are_those_of_plain_decoding(layers):
    async with system(draft=DEMO / "target", drafts={"layers": layers}, speculation=TREES) as served:
        prompt = served.tokenizer.encode(PROMPT)
        for temperature in (0.0, 0.8):
            job = request(prompt, 32, sampling=Sampling(temperature=temperature, top_k=40, seed=7))
            chunks = await served.complete(job)
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            assert tokens == await served.tokens(replace(job, max_draft_tokens=0))
            if len(layers) > 1 and not temperature:
                assert chunks[-1].stats.num_accepted_tokens > 8
        await served.check_nothing_is_held()


async def test_it_draws_for_rejection_verification():
    async with system(draft=DEMO / "target", drafts={"layers": (0, 1, 2, 5)}) as served:
        sampling = Sampling(temperature=1.0, seed=3)
        job = request(served.tokenizer.encode(PROMPT), 24, sampling=sampling, verification=Verification.REJECTION)
        chunks = await served.complete(job)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 24
        assert chunks[-1].stats.num_accepted_tokens > 0
        await served.check_nothing_is_held()
