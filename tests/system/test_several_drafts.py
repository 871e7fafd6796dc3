"""Two drafts of one session: their guesses meet in one tree, no token changes, and each may be lost alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from local import DEMO, noisy_copy, request, system

from core.config import SpeculationConfig
from core.records import Sampling, Verification
from core.speculation.calibration import PRIOR, WINDOW
from orchestrator.policy.policies import Controller

NUM_TOKENS = 32
PROMPTS = ["def parse_args(self, args):\n    ", "import os\nimport sys\n\n"]
GREEDY, SEEDED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=17)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
TREE = SpeculationConfig(policy="static_tree", max_block_tokens=16, guessers=("draft",), draft_timeout_s=30.0)
WAYS = {"pipelined": TREE, "in turn": replace(TREE, pipelining=False), "adaptive": replace(TREE, policy="adaptive")}
QUICK = ("greedy", "in turn"), ("seeded", "adaptive")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return noisy_copy(DEMO / "draft", tmp_path_factory.mktemp("other"))


PLAIN: dict[Sampling, list[list[int]]] = {}
"""Expected outputs of each test; computed once."""


async def plain(sampling):
    if sampling not in PLAIN:
        async with system(draft=None) as served:
            jobs = [request(served.tokenizer.encode(text), NUM_TOKENS, sampling=sampling) for text in PROMPTS]
            PLAIN[sampling] = [await served.tokens(job) for job in jobs]
    return PLAIN[sampling]


@pytest.mark.parametrize(
    ("sampling", "speculation"),
    [
        pytest.param(sampling, speculation, id=f"{drawn}-{way}", marks=() if (drawn, way) in QUICK else pytest.mark.ci)
        for drawn, sampling in SAMPLINGS.items()
        for way, speculation in WAYS.items()
    ],
)
async def test_the_output_is_that_of_plain_decoding(other, sampling, speculation):
    expected = await plain(sampling)
    async with system(extra_drafts=[other], speculation=speculation, is_patient=True) as served:
        sources = {}
        for text, tokens in zip(PROMPTS, expected, strict=True):
            chunks = await served.complete(request(served.tokenizer.encode(text), NUM_TOKENS, sampling=sampling))
            assert [token for chunk in chunks for token in chunk.token_ids] == tokens
            stats = chunks[-1].stats
            assert stats.num_lookup_tokens == 0, "a draft's guesses are none of a lookup"
            for source in stats.sources:
                sources[source.name] = sources.get(source.name, 0) + source.num_drafted_tokens
        await served.check_nothing_is_held()
    if speculation.policy == "static_tree":  # the adaptive one may rest, as on a busy machine
        assert all(sources.get(name) for name in ("draft", "draft_2")), "nodes of both are verified"


@pytest.mark.parametrize(
    ("sampling", "killed"),
    [
        (GREEDY, "draft"),
        (SEEDED, "draft1"),
        pytest.param(GREEDY, "draft1", marks=pytest.mark.ci),
        pytest.param(SEEDED, "draft", marks=pytest.mark.ci),
    ],
    ids=["greedy-draft", "seeded-draft1", "greedy-draft1", "seeded-draft"],
)
async def test_a_stream_goes_on_with_the_draft_that_is_left(other, sampling, killed):
    speculation = TREE
    expected = await plain(sampling)
    async with system(extra_drafts=[other], speculation=speculation, is_patient=True) as served:
        asked = request(served.tokenizer.encode(PROMPTS[0]), NUM_TOKENS, sampling=sampling)
        tokens, last = [], None
        async for chunk in served.service.generate(asked):
            if not len(tokens) < 16 and served.leases.engines[killed] is not None:
                await served.leases.kill(killed)
            tokens += chunk.token_ids
            last = chunk
        assert tokens == expected[0]
        assert last.stats.num_draft_failures >= 1
        chunks = await served.complete(replace(asked, request_id="after"))
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[0]
        names = {source.name for source in chunks[-1].stats.sources}
        assert names == {"draft_2" if killed == "draft" else "draft"}, "who is left still guesses"


@pytest.mark.parametrize("rule", [Verification.REJECTION, Verification.BLOCK])
async def test_where_drafts_sample_the_first_does_alone(other, rule):
    async with system(extra_drafts=[other]) as served:
        asked = request(served.tokenizer.encode(PROMPTS[0]), 24, sampling=SEEDED, verification=rule)
        chunks = await served.complete(asked)
        assert {source.name for source in chunks[-1].stats.sources} <= {"draft", "prompt_lookup"}
        await served.check_nothing_is_held()


async def test_each_draft_is_judged_by_itself():
    """A copy of the target beside the demo draft: whatever it has said is right, and it has said something."""
    first = Controller(TREE)
    async with system(extra_drafts=[DEMO / "target"], speculation=TREE, policies=first, is_patient=True) as served:
        for text in PROMPTS:
            await served.complete(request(served.tokenizer.encode(text), 64, sampling=GREEDY))
        extra = served.service._extra_policies[0]
    seen, usual = (
        max((each.accepted for each in known._known.kinds.values()), key=lambda accepted: accepted.num_seen)
        for known in (extra, first)
    )
    assert seen.num_seen > 4
    assert seen.value == pytest.approx(all_right(seen.num_seen))
    assert usual.value < all_right(usual.num_seen), "the first draft is not always right"
    assert extra._known.num_sessions == 0


def all_right(num_seen):
    """An average's value after so many observations without a miss."""
    return 1.0 - (1.0 - PRIOR) * (1.0 - 1.0 / WINDOW) ** num_seen
