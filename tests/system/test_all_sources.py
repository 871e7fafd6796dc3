"""All ways of guessing at once: two drafts with a lookup of their own, and every guesser; the output is the target's.

Each way alone has its own tests; here their nodes, questions and offers meet in one tree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from local import DEMO, noisy_copy, request, system
from scipy import stats
from test_law import SIGNIFICANCE, copying, law_of, perturbed
from test_structured import SCHEMAS, schema_grammar

from core.config import SpeculationConfig
from core.records import DraftUpdate, Sampling, Verification
from orchestrator.guessers import NEED_INDEX, SOURCES
from simulation.chaos.corruptions import DRAFT_CORRUPTIONS
from tests import checkpoints

EVERYBODY = tuple(source for source in SOURCES if source not in NEED_INDEX)
PROMPTS = ["def parse_args(self, args):\n    ", "import os\nimport sys\n\n"]
TREE = SpeculationConfig(
    policy="static_tree",
    max_block_tokens=16,
    guessers=EVERYBODY,
    lookahead_window=4,
    lookahead_ngram=3,
    draft_timeout_s=30.0,
)
POLICIES = {
    "static_tree": TREE,
    "static_tree in turn": replace(TREE, pipelining=False),
    "static in turn": replace(TREE, policy="static", pipelining=False),
    "adaptive": replace(TREE, policy="adaptive"),
    "adaptive in turn": replace(TREE, policy="adaptive", pipelining=False),
}
IN_A_HURRY = ("static_tree in turn", "adaptive")
POLICY = pytest.mark.parametrize(
    "policy", [name if name in IN_A_HURRY else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
CASCADE = {"cascade_tokens": 4}
NUM_TOKENS, NUM_STREAMS, NUM_AT_ONCE = 4, 640, 32


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return noisy_copy(DEMO / "draft", tmp_path_factory.mktemp("other"))


def jobs_of(tokenizer):
    """Greedy and by seeds, free and held to a schema."""
    samplings = [Sampling(temperature=0.0), *(Sampling(temperature=1.0, seed=seed) for seed in (3, 17))]
    free = [
        request(tokenizer.encode(PROMPTS[number % 2]), 32, sampling=sampling)
        for number, sampling in enumerate(samplings)
    ]
    held = {"grammar": schema_grammar(SCHEMAS[1]), "ignore_eos": False}
    return [*free, *(replace(job, **held) for job in free[:2])]


@pytest.fixture(scope="module")
def plain():
    """The tokens of all jobs by plain decoding."""

    async def decode():
        async with system(draft=None) as served:
            return await served.all_tokens(replace(job, max_draft_tokens=0) for job in jobs_of(served.tokenizer))

    return asyncio.run(decode())


async def check_outputs(served, plain):
    """All jobs at once; returns how many guesses of each source were verified."""
    streams = await asyncio.gather(*map(served.complete, jobs_of(served.tokenizer)))
    assert [[token for chunk in chunks for token in chunk.token_ids] for chunks in streams] == plain
    stats = [chunks[-1].stats for chunks in streams]
    assert not any(each.num_target_failures for each in stats), "no verdict was thrown away"
    await served.check_nothing_is_held()
    found = Counter()
    for each in stats:
        found.update({source.name: source.num_drafted_tokens for source in each.sources})
        assert not any(source.num_failures for source in each.sources)
    return found


@POLICY
async def test_tokens_are_those_of_plain_decoding(other, plain, policy):
    async with system(extra_drafts=[other], speculation=POLICIES[policy], drafts=CASCADE, is_patient=True) as served:
        found = await check_outputs(served, plain)
    assert {"draft", "draft_2"} <= set(found) or not policy.startswith("static_tree"), f"both meet in one tree: {found}"


def all_outside(reply, _):
    """Each token outside the vocabulary; of one among many that is, a small block seldom has the node."""
    nodes = reply.new_nodes
    return replace(reply, new_nodes=replace(nodes, tokens=np.full_like(nodes.tokens, 10**6)))


def lying(reply, dice):
    """A kind of lie that the chaos of the simulation knows, or the truth where the record itself refuses that."""
    try:
        return dice.choice([*DRAFT_CORRUPTIONS.values(), *[all_outside] * len(DRAFT_CORRUPTIONS)])(reply, dice)
    except ValueError:
        return reply


@POLICY
async def test_a_lying_extra_draft_changes_no_token(other, plain, policy, monkeypatch):
    async with system(extra_drafts=[other], speculation=POLICIES[policy], drafts=CASCADE) as served:
        dice, told = Random(5), Counter()

        def perhaps(reply):
            said = lying(reply, dice) if isinstance(reply, DraftUpdate) and dice.random() < 0.3 else reply
            told["lies"] += said is not reply
            return said

        port = served.leases.ports["draft1"]
        exchange = port.exchange

        async def lying_exchange(batch, take):
            await exchange(batch, lambda reply: take(perhaps(reply)))

        monkeypatch.setattr(port, "exchange", lying_exchange)
        await check_outputs(served, plain)
    assert told["lies"] or policy.startswith("adaptive"), "a draft that does not lie tests nothing"


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["static_tree in turn", pytest.param("adaptive", marks=pytest.mark.slow)])
@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK], ids=str)
async def test_where_the_draft_samples_the_law_is_the_targets(verification, policy, tmp_path):
    """The test of test_law with these sources, and with these policies in place of dice."""
    model = checkpoints.build("llama", seed=4)
    prompt = copying(model)
    target, draft, second = (checkpoints.write("llama", tmp_path / name, seed=4) for name in ("t", "d", "e"))
    for seed, directory in ((5, draft), (6, second)):
        perturbed(checkpoints.build("llama", seed=4), seed=seed).save_pretrained(directory)
    guessers = tuple(source for source in EVERYBODY if source != "grammar")
    speculation = replace(POLICIES[policy], guessers=guessers, lookup_min_match=1)
    counts = Counter()
    async with system(target, draft, extra_drafts=[second], speculation=speculation, drafts=CASCADE) as served:
        for first in range(0, NUM_STREAMS, NUM_AT_ONCE):
            jobs = [
                request(
                    prompt, NUM_TOKENS, verification=verification, sampling=Sampling(1.0, top_k=3, seed=1000 + seed)
                )
                for seed in range(first, first + NUM_AT_ONCE)
            ]
            counts.update(tuple(tokens) for tokens in await asyncio.gather(*map(served.tokens, jobs)))
        await served.check_nothing_is_held()
    expected = law_of(model, prompt)
    assert set(counts) <= set(expected)
    common = [path for path, chance in expected.items() if chance * NUM_STREAMS > 5]
    seen, chances = [counts[path] for path in common], [expected[path] for path in common]
    rest = max(1.0 - sum(chances), 1e-9)
    fit = stats.chisquare([*seen, NUM_STREAMS - sum(seen)], NUM_STREAMS * np.array([*chances, rest]))
    assert fit.pvalue > SIGNIFICANCE, fit
