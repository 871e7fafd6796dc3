"""The whole system while it learns: no token changes, and what is kept of the streams is what they said."""

from __future__ import annotations

import pytest
from local import request, system

from core.config import SpeculationConfig
from core.records import Sampling
from workers.live import files_after, read_kept

PROMPTS = ["def parse_args(self, args):\n    ", "# Notes\n\nThe first thing to say is that "]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.8, seed=11)]
NUM_TOKENS = 40


async def outputs(served, sampling, **changes):
    jobs = [
        request(served.tokenizer.encode(text), NUM_TOKENS, sampling=sampling, request_id=text, **changes)
        for text in PROMPTS
    ]
    return await served.all_tokens(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_streams_are_kept_as_they_were_said_and_change_by_nothing(tmp_path, sampling):
    """Pipelined, with offers that the target continues with by itself."""
    speculation = SpeculationConfig(policy="static_tree", max_block_tokens=6, draft_timeout_s=30.0)
    async with system(speculation=speculation) as served:
        plain = await outputs(served, sampling, max_draft_tokens=0)
    collecting = {"learning_buffer": str(tmp_path)}
    async with system(speculation=speculation, targets=collecting) as served:
        assert await outputs(served, sampling) == plain
        await outputs(served, sampling, learning=False)
        prompts = [list(served.tokenizer.encode(text)) for text in PROMPTS]
        await served.check_nothing_is_held()
        served.leases.engines["target"].close()
    texts = read_kept(files_after(tmp_path))
    assert len(texts) == len(PROMPTS), "of those who allow it"
    for prompt, output in zip(prompts, plain, strict=True):
        (text,) = [text for text in texts if text.token_ids[: len(prompt)] == prompt]
        assert text.token_ids[text.first :][:NUM_TOKENS] == output
        if not sampling.temperature:
            assert all(ids[0] == text.token_ids[place] for place, ids in zip(text.missed, text.top_ids, strict=True))
