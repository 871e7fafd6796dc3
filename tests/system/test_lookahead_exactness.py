"""Lookahead decoding changes no token, alone and beside a draft, and its questions are answered and pay."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from local import request, system

from core.config import SpeculationConfig
from core.records import Sampling

PROMPTS = [
    "def parse_args(self, args):\n    ",
    "import os\nimport sys\n\n",
    "    for key, value in self.items():\n        if",
]
ALWAYS = SpeculationConfig(policy="static_tree", guessers=("lookahead",), lookahead_window=5, draft_timeout_s=30.0)


async def test_the_tokens_are_those_of_plain_decoding_and_come_in_fewer_passes():
    """Greedy and with shared noise, alone and three at once; a window near the end of the output is left out."""
    async with system(speculation=ALWAYS) as served:
        prompts = [served.tokenizer.encode(text) for text in PROMPTS]
        for temperature in (0.0, 0.8):
            jobs = [
                request(prompt, 40, sampling=Sampling(temperature=temperature, top_k=40, seed=seed))
                for seed, prompt in enumerate(prompts)
            ]
            plain = [await served.tokens(replace(job, max_draft_tokens=0)) for job in jobs]
            streams = await asyncio.gather(*map(served.complete, jobs))
            assert [[token for chunk in chunks for token in chunk.token_ids] for chunks in streams] == plain
            stats = [chunks[-1].stats for chunks in streams]
            accepted = Counter[str]()
            for each in stats:
                accepted.update({source.name: source.num_accepted_tokens for source in each.sources})
                assert each.num_accepted_tokens <= each.num_drafted_tokens
            if not temperature:
                assert accepted["lookahead"] > 20
                assert sum(each.num_rounds for each in stats) < sum(map(len, plain)) * 0.8
        both = replace(jobs[0], guessers=("draft", "prompt_lookup", "lookahead"))
        assert await served.tokens(both) == plain[0]
        await served.check_nothing_is_held()


async def test_a_policy_that_weighs_costs_changes_no_token_either():
    """Rows of this target are dear: the adaptive policy asks now and then."""
    async with system(speculation=replace(ALWAYS, policy="adaptive"), draft=None) as served:
        job = request(served.tokenizer.encode(PROMPTS[0]), 48)
        assert await served.tokens(job) == await served.tokens(replace(job, max_draft_tokens=0))
        await served.check_nothing_is_held()
