"""The law of the output through real engines and sessions: that of the target, whoever guesses, and however.

Where sampling keeps three tokens of each row, four tokens can come out in 81 ways, whose chances follow from the target
alone. Policies decide by dice (`wild`), so blocks of all lengths are cut, hit, missed and abandoned on the way.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from local import request, system
from scipy import stats
from wild import PATIENT, WildPolicies

from core.records import Sampling, Verification
from tests import checkpoints

PROMPT = (7, 11, 13, 17)
NUM_TOKENS = 4
NUM_STREAMS = 1200
NUM_AT_ONCE = 32
SIGNIFICANCE = 1e-6
WITHOUT_A_MODEL = ("prompt_lookup", "ngram", "suffix")
DRAWN_FROM = ("ngram",)
"""Its guesses are drawn from its counts, where the others are sure of theirs."""


def perturbed(model, seed):
    """Nearly the same model: most of its likely tokens are the other's, with other chances."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def law_of(model, prompt):
    """The chance of each way in which the target may go on."""
    chances = {(): 1.0}
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *path] for path in chances])).logits[:, -1, : checkpoints.VOCAB_SIZE]
        kept = logits.double().topk(3)
        chances = {
            (*path, token): chance * share
            for (path, chance), tokens, shares in zip(
                chances.items(), kept.indices.tolist(), kept.values.softmax(-1).tolist(), strict=True
            )
            for token, share in zip(tokens, shares, strict=True)
        }
    return chances


def _likely(model, prompts):
    """The three tokens that may follow each."""
    with torch.no_grad():
        logits = model(torch.tensor(prompts)).logits[:, -1, : checkpoints.VOCAB_SIZE]
    return logits.topk(3).indices.tolist()


def copying(model):
    """A prompt (a, b, c) after which a may well come again, and b after that: then b is guessed, and may be right."""

    likely = functools.partial(_likely, model)
    for last in range(2, 100):
        prompts = [(a, b, last) for a in range(2, 60) for b in range(2, 60) if len({a, b, last}) == 3]
        ways = zip(prompts, likely(prompts), strict=True)
        again = [(*prompt, prompt[0]) for prompt, tokens in ways if prompt[0] in tokens]
        found = (prompt for prompt in again if prompt[1] in likely([prompt])[0])
        if (prompt := next(found, None)) is not None:
            return prompt[:3]
    raise AssertionError("no prompt is copied")


def branching(model):
    """A prompt (a, b, a, c, d) after which a may well come again. Then the tables of n-grams are torn between b and c,
    which both may follow."""
    ends = list(itertools.permutations(range(2, 80), 2))
    follow = _likely(model, [(a, 2, a, 3, d, a) for a, d in ends])
    prompts = [(a, b, a, c, d) for (a, d), (b, c, _) in zip(ends, follow, strict=True) if len({a, b, c, d}) == 4]
    again = [(*prompt, prompt[0]) for prompt in prompts]
    found = [
        prompt
        for prompt, first, second in zip(prompts, _likely(model, prompts), _likely(model, again), strict=True)
        if prompt[0] in first and {prompt[1], prompt[3]} <= {*second}
    ]
    return max(found, key=lambda prompt: _chance_of_branching(law_of(model, prompt), prompt))


def _chance_of_branching(law, prompt):
    return sum(chance for path, chance in law.items() if path[0] == prompt[0] and path[1] in (prompt[1], prompt[3]))


@pytest.mark.parametrize(
    ("verification", "guessers"),
    [
        (Verification.REJECTION, ("draft",)),
        pytest.param(Verification.REJECTION, WITHOUT_A_MODEL, marks=pytest.mark.ci),
        pytest.param(Verification.REJECTION, DRAWN_FROM, marks=pytest.mark.ci),
        (Verification.BLOCK, DRAWN_FROM),
        pytest.param(Verification.RECURSIVE_REJECTION, DRAWN_FROM, marks=pytest.mark.slow),
        pytest.param(Verification.SEQUENTIAL_SELECTION, DRAWN_FROM, marks=pytest.mark.slow),
        pytest.param(Verification.RECURSIVE_REJECTION, ("draft",), marks=pytest.mark.ci),
        pytest.param(Verification.SEQUENTIAL_SELECTION, ("draft",), marks=pytest.mark.slow),
        pytest.param(Verification.RECURSIVE_REJECTION, WITHOUT_A_MODEL, marks=pytest.mark.slow),
        pytest.param(Verification.BLOCK, ("draft",), marks=pytest.mark.slow),
        pytest.param(Verification.BLOCK, WITHOUT_A_MODEL, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_the_joint_law_of_the_first_tokens_is_the_targets(verification, guessers, tmp_path):
    """Guessers are asked only where there is no draw: beside one, they would decide whether it is verified."""
    model = checkpoints.build("llama", seed=4)
    prompt = PROMPT if "draft" in guessers else branching(model) if guessers == DRAWN_FROM else copying(model)
    target = checkpoints.write("llama", tmp_path / "target", seed=4)
    draft = checkpoints.write("llama", tmp_path / "draft", seed=4)
    perturbed(checkpoints.build("llama", seed=4), seed=5).save_pretrained(draft)
    counts, policies = Counter(), WildPolicies(seed=11)
    async with system(target, draft, speculation=replace(PATIENT, lookup_min_match=1), policies=policies) as served:
        for first in range(0, NUM_STREAMS, NUM_AT_ONCE):
            jobs = [
                request(
                    prompt,
                    NUM_TOKENS,
                    verification=verification,
                    guessers=guessers,
                    sampling=Sampling(1.0, top_k=3, seed=seed),
                )
                for seed in range(first, min(first + NUM_AT_ONCE, NUM_STREAMS))
            ]
            counts.update(tuple(tokens) for tokens in await asyncio.gather(*map(served.tokens, jobs)))
        await served.check_nothing_is_held()

    expected = law_of(model, prompt)
    assert set(counts) <= set(expected)
    common = [path for path, chance in expected.items() if chance * NUM_STREAMS > 5]
    assert len(common) > 8, "a law worth testing"
    seen = [counts[path] for path in common]
    chances = [expected[path] for path in common]
    fit = stats.chisquare(
        [*seen, NUM_STREAMS - sum(seen)], NUM_STREAMS * np.array([*chances, max(1.0 - sum(chances), 1e-9)])
    )
    assert fit.pvalue > SIGNIFICANCE, fit
    rounds = [seen for policy in policies.policies for seen in policy.rounds]
    num_guesses, num_accepted = sum(len(seen.shape) for seen in rounds), sum(len(seen.path) for seen in rounds)
    assert 0.03 * num_guesses < num_accepted < 0.95 * num_guesses, "some are accepted, some rejected"
