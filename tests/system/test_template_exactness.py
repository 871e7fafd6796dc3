"""A template is a guess: the tokens are those of plain decoding, greedy and seeded, wherever the output leaves it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from local import request, system

from core.config import SpeculationConfig
from core.records import Grammar, GrammarKind, Sampling, Verification

PROMPTS = ["class Config:\n    @property\n    def name(self):\n", "import os\nimport sys\n\n"]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=5)]
STATIC = SpeculationConfig(policy="static", max_draft_tokens=8, draft_timeout_s=30.0)
"""The adaptive policy might rest on a busy machine."""
ADAPTIVE = replace(STATIC, policy="adaptive")


def template(expression):
    return Grammar(GrammarKind.REGEX, expression)


def whole(text):
    """The text to the letter."""
    return template(re.escape(text))


def slotted(text):
    """Its words to the letter, and anything in place of names."""
    parts = re.split(r"([a-z]{4,})", text)
    return template("".join("[A-Za-z_]*" if number % 6 == 1 else re.escape(part) for number, part in enumerate(parts)))


def leaving(text):
    """A template that begins like the text, and then has something else."""
    return template(re.escape(text[: len(text) // 2]) + "éèê, and so on for ever")


KINDS = {
    "whole": whole,
    "slots": slotted,
    "leaves": leaving,
    "never": lambda _: template("Dear [A-Z][a-z]+, thank you"),
}


async def complete(served, jobs):
    found = await asyncio.gather(*map(served.complete, jobs))
    return [([token for chunk in each for token in chunk.token_ids], each[-1].stats) for each in found]


def accepted(stats, source="template"):
    return sum(each.num_accepted_tokens for each in stats.sources if each.name == source)


@pytest.mark.parametrize("guessers", [("template",), ("draft", "prompt_lookup")], ids=str)
async def test_tokens_are_those_without_it_by_whatever_template(guessers):
    """Whichever the policy takes. Alone, what is by the letter is guessed, and what is left half way up to there."""
    is_alone = guessers == ("template",)
    async with system(speculation=STATIC if is_alone else ADAPTIVE) as served:
        jobs = [
            replace(request(served.tokenizer.encode(prompt), 36, sampling=sampling), guessers=guessers)
            for prompt in PROMPTS[: 2 if is_alone else 1]
            for sampling in SAMPLINGS
        ]
        plain = await complete(served, [replace(job, max_draft_tokens=0) for job in jobs])
        texts = [served.tokenizer.decode(tokens) for tokens, _ in plain]
        assert not any("\ufffd" in text for text in texts)
        made = {}
        for name, kind in KINDS.items() if is_alone else [*KINDS.items()][::2]:
            asked = [replace(job, template=kind(text)) for job, text in zip(jobs, texts, strict=True)]
            await complete(served, asked)  # by its end all are compiled, whatever else the machine does
            found = await complete(served, asked)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain], name
            assert not any(each.num_failures for _, stats in found for each in stats.sources), name
            made[name] = [accepted(stats) for _, stats in found]
        await served.check_nothing_is_held()
    if is_alone:
        assert not any(made["never"])
        assert min(made["whole"]) > 15
        assert min(made["slots"]) > 5
        assert all(5 < half < whole for half, whole in zip(made["leaves"], made["whole"], strict=True))


async def test_a_template_that_does_not_compile_costs_its_own_session_the_source_and_nothing_else():
    """The edge refuses such; here it has come through. Its neighbours have theirs."""
    async with system(draft=None, speculation=replace(STATIC, guessers=("prompt_lookup",))) as served:
        job = request(served.tokenizer.encode(PROMPTS[0]), 32, sampling=SAMPLINGS[0])
        ((plain, _),) = await complete(served, [replace(job, max_draft_tokens=0)])
        good, bad = (replace(job, template=each) for each in (whole(served.tokenizer.decode(plain)), template("((")))
        await complete(served, [good])
        found = await complete(served, [bad, good] * 3)
        await served.check_nothing_is_held()
    assert all(tokens == plain for tokens, _ in found)
    failures = [[each.num_failures for each in stats.sources if each.name == "template"] for _, stats in found]
    assert failures == [[1], [0]] * 3
    assert all(accepted(stats) > 10 for _, stats in found[1::2])


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK], ids=str)
async def test_rules_that_need_q_accept_what_it_expects(verification):
    async with system(draft=None, speculation=STATIC) as served:
        job = request(
            served.tokenizer.encode(PROMPTS[0]), 40, sampling=Sampling(1.0, seed=3), verification=verification,
            template=template("[\\s\\S]{3,99}"),
        )  # fmt: skip
        held = replace(
            job, ignore_eos=False, grammar=Grammar(GrammarKind.REGEX, "version = [0-9] of the release, as it is said"),
            template=template("version = [0-9] of the release, as it is said"), guessers=("template",),
        )  # fmt: skip
        await complete(served, [job, held])
        ((_, free), (_, found)) = await complete(served, [job, held])
        await served.check_nothing_is_held()
    assert accepted(free) == 0
    assert accepted(found) > 5


async def test_an_output_that_is_resumed_goes_on_in_its_template():
    async with system(draft=None, speculation=STATIC) as served:
        job = request(served.tokenizer.encode(PROMPTS[0]), 40, sampling=SAMPLINGS[1], guessers=("template",))
        ((plain, _),) = await complete(served, [replace(job, max_draft_tokens=0)])
        rest = replace(job, template=whole(served.tokenizer.decode(plain)), resume_tokens=tuple(plain[:15]))
        await complete(served, [rest])
        ((tokens, stats),) = await complete(served, [rest])
        await served.check_nothing_is_held()
    assert tokens == plain[15:]
    assert accepted(stats) > 10
