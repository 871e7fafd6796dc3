"""Output that is held to a grammar: whole, of the masked law, and the same whoever guesses and whatever dies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from local import DEMO, request, system
from scipy import stats
from transformers import AutoModelForCausalLM
from wild import PATIENT, WildPolicies

from core.config import EngineConfig, SpeculationConfig
from core.errors import InvalidRequest
from core.records import FinishReason, Grammar, GrammarKind, Sampling, Verification
from workers.engine.target import TargetEngine

EOS = 0
SIGNIFICANCE = 1e-6
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "likes": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "likes"],
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "properties": {
        "function": {"enum": ["open", "read", "write", "close"]},
        "arguments": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "pattern": "^[a-z]{1,8}(/[a-z]{1,8}){0,2}$"},
                "mode": {"const": "rb"},
                "size": {"type": "integer", "minimum": -1, "maximum": 65536},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    },
    "required": ["function", "arguments"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 6}, "minItems": 1, "maxItems": 4}
SCHEMAS = [PERSON, CALL, LIST]
PROMPTS = [
    "def parse_args(self, args):\n    ",
    "class Path:\n    def __init__(self",
    "import os\nimport sys\n\n",
    "    for key, value in self.items():\n        if",
    "# Copyright",
    'raise ValueError("',
]


def schema_grammar(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def jobs_of(served, count):
    """Requests over all schemas and prompts, a third of them greedy, the others with seeds; some with penalties."""
    samplings = [
        lambda seed: Sampling(temperature=0.0),
        lambda seed: Sampling(temperature=0.8, seed=seed),
        lambda seed: Sampling(temperature=1.2, seed=seed, top_p=0.95, repetition_penalty=1.1),
    ]
    return [
        (
            SCHEMAS[number % len(SCHEMAS)],
            request(
                served.tokenizer.encode(f"{PROMPTS[number % len(PROMPTS)]} {number if number > 17 else ''}"),
                200,
                sampling=samplings[number // 2 % len(samplings)](number),
                grammar=schema_grammar(SCHEMAS[number % len(SCHEMAS)]),
                ignore_eos=False,
            ),
        )
        for number in range(count)
    ]


async def outputs(served, jobs, num_at_once=16):
    """The tokens of each request, its text, and why it ended."""
    found = []
    for first in range(0, len(jobs), num_at_once):
        chunks = await asyncio.gather(*map(served.complete, jobs[first : first + num_at_once]))
        found += [
            (
                [token for chunk in each for token in chunk.token_ids],
                "".join(chunk.text for chunk in each),
                each[-1].finish_reason,
            )
            for each in chunks
        ]
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [6, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.ci])])
async def test_schema_bound_output_is_valid_and_the_same_with_and_without_guesses(count):
    """Guesses are chains, and trees that are cut, hit, missed and abandoned by dice."""
    policies = WildPolicies(seed=7)
    async with system(speculation=PATIENT, policies=policies) as wild, system(gamma=5) as chains:
        schemas, jobs = zip(*jobs_of(wild, count), strict=True)
        plain = await outputs(wild, [replace(job, max_draft_tokens=0) for job in jobs])
        assert await outputs(wild, jobs[::2]) == plain[::2]
        assert await outputs(chains, jobs[1::2]) == plain[1::2]
        await wild.check_nothing_is_held()
        await chains.check_nothing_is_held()
    for schema, (tokens, text, reason) in zip(schemas, plain, strict=True):
        assert reason is FinishReason.STOP
        assert tokens[-1] == EOS
        jsonschema.validate(json.loads(text), schema)
    rounds = [seen for policy in policies.policies for seen in policy.rounds]
    assert any(len(set(seen.shape.parents)) < len(seen.shape) and len(seen.path) > 1 for seen in rounds), "trees"


async def test_the_draft_guesses_by_the_grammar_too():
    """Nearly all of its guesses would be forbidden otherwise: it completes Python."""
    async with system(gamma=4, is_patient=True) as served:
        _, jobs = zip(*jobs_of(served, 3), strict=True)
        for job in jobs:
            chunks = await served.complete(job)
            assert chunks[-1].stats.num_accepted_tokens > 0.4 * sum(len(chunk.token_ids) for chunk in chunks)
        await served.check_nothing_is_held()


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
async def test_guesses_that_are_drawn_keep_the_output_valid(verification):
    async with system(gamma=4) as served:
        schemas, jobs = zip(*jobs_of(served, 6)[2:5], strict=True)  # of each schema one, none of them greedy
        found = await outputs(served, [replace(job, verification=verification) for job in jobs])
        await served.check_nothing_is_held()
    for schema, (_, text, reason) in zip(schemas, found, strict=True):
        assert reason is FinishReason.STOP
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("guessers", [("grammar",), ("draft", "prompt_lookup", "grammar")], ids=str)
async def test_what_the_grammar_forces_is_guessed_with_and_without_a_draft_and_changes_no_token(guessers):
    """Greedy and seeded, by a policy that verifies guesses whatever they cost."""
    speculation = SpeculationConfig(policy="static_tree", max_block_tokens=8, draft_timeout_s=30.0)
    async with system(speculation=speculation) as served:
        _, jobs = zip(*jobs_of(served, 6)[::2], strict=True)  # of each schema and each way to sample one
        plain = await outputs(served, [replace(job, max_draft_tokens=0) for job in jobs])
        chunks = await asyncio.gather(*(served.complete(replace(job, guessers=guessers)) for job in jobs))
        await served.check_nothing_is_held()
    assert [[token for chunk in each for token in chunk.token_ids] for each in chunks] == [each[0] for each in plain]
    sources = [source for each in chunks for source in each[-1].stats.sources]
    assert not any(source.num_failures for source in sources)
    if guessers == ("grammar",):  # what the draft guesses, too, counts for the draft
        assert {source.name for source in sources} == {"grammar"}
        assert sum(source.num_accepted_tokens for source in sources) > 10


@pytest.mark.parametrize("verification", [Verification.REJECTION, Verification.BLOCK])
async def test_forced_tokens_are_accepted_by_rules_that_need_q_too(verification):
    """Nobody drew them, so they count as certain. The policy is static: an adaptive one may rest on a busy machine."""
    speculation = SpeculationConfig(policy="static_tree", max_draft_tokens=8, guessers=("grammar",))
    async with system(draft=None, speculation=speculation) as served:
        prompt = served.tokenizer.encode(LAW_PROMPT)
        job = request(
            prompt, 40, sampling=Sampling(1.0, seed=3), verification=verification, ignore_eos=False,
            grammar=Grammar(GrammarKind.REGEX, "version = [0-9] of the release, as it is said"),
        )  # fmt: skip
        await served.complete(job)  # by its end the grammar has been compiled, whatever else the machine does
        chunks = await served.complete(job)
        await served.check_nothing_is_held()
    assert "of the release, as it is said" in "".join(chunk.text for chunk in chunks)
    assert chunks[-1].stats.num_accepted_tokens > 5


LETTERS, SHORTEST, LONGEST = set("adefn"), 2, 3
"""No beginning forces what follows: where it does the library lets the text's usual tokens through, and no others."""
LAW_PROMPT = "def parse_args(self, args):\n    "
NUM_STREAMS = 360


def law_of(prompt, vocabulary):
    """The chance of each output: of the target's logits where only what may lead to a word is let through."""
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()
    law, open_paths = {}, {(): (1.0, "")}
    while open_paths:
        longer = {}
        for path, (chance, text) in open_paths.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *path]])).logits[0, -1].double()
            following = {token: text + piece for token, piece in vocabulary.items() if len(text + piece) <= LONGEST}
            allowed = [*following, *([EOS] if len(text) >= SHORTEST else [])]
            for token, share in zip(allowed, logits[allowed].softmax(-1).tolist(), strict=True):
                if token == EOS:
                    law[*path, EOS] = chance * share
                else:
                    longer[*path, token] = (chance * share, following[token])
        open_paths = longer
    return law


@pytest.mark.parametrize(
    "verification",
    [
        pytest.param(Verification.REJECTION, marks=pytest.mark.ci),
        pytest.param(Verification.BLOCK, marks=pytest.mark.ci),
        pytest.param(Verification.COUPLED, marks=pytest.mark.slow),
    ],
)
async def test_the_law_of_the_output_is_that_of_the_masked_target(verification):
    counts, policies = Counter(), WildPolicies(seed=11)
    async with system(speculation=PATIENT, policies=policies) as served:
        prompt = served.tokenizer.encode(LAW_PROMPT)
        pieces = {token: served.tokenizer.decode([token]) for token in range(1, 4096)}
        expected = law_of(prompt, {token: piece for token, piece in pieces.items() if piece and set(piece) <= LETTERS})
        job = request(
            prompt, 16, verification=verification, ignore_eos=False,
            grammar=Grammar(GrammarKind.REGEX, f"[{''.join(sorted(LETTERS))}]{{{SHORTEST},{LONGEST}}}"),
        )  # fmt: skip
        for first in range(0, NUM_STREAMS, 30):
            jobs = [replace(job, sampling=Sampling(1.0, seed=seed)) for seed in range(first, first + 30)]
            counts.update(tuple(tokens) for tokens in await asyncio.gather(*map(served.tokens, jobs)))
        await served.check_nothing_is_held()
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-6)
    assert set(counts) <= set(expected)
    common = [path for path, chance in expected.items() if chance * NUM_STREAMS > 5]
    assert len(common) > 5, "a law worth testing"
    seen, chances = [counts[path] for path in common], [expected[path] for path in common]
    rest = max(1.0 - sum(chances), 1e-9)
    fit = stats.chisquare([*seen, NUM_STREAMS - sum(seen)], NUM_STREAMS * np.array([*chances, rest]))
    assert fit.pvalue > SIGNIFICANCE


async def test_a_stream_whose_target_dies_goes_on_by_the_same_grammar():
    async with system(gamma=4) as served:
        _, jobs = zip(*jobs_of(served, 4), strict=True)
        expected = await outputs(served, jobs)
        streams = asyncio.gather(*map(served.complete, jobs))
        config = EngineConfig(str(DEMO / "target"), deterministic=True)
        await asyncio.sleep(0.05)
        await served.leases.replace_engine("target", TargetEngine.load(config, 3, lambda _: None))
        found = await streams
        assert [[token for chunk in each for token in chunk.token_ids] for each in found] == [
            each[0] for each in expected
        ]
        await served.check_nothing_is_held()


async def test_a_stream_is_resumed_in_the_middle_of_a_word_of_its_grammar():
    async with system(gamma=4) as served:
        _, jobs = zip(*jobs_of(served, 4), strict=True)
        for job in jobs[1::2]:
            tokens = await served.tokens(job)
            for num_received in (1, len(tokens) // 2, len(tokens) - 1):
                resumed = replace(job, resume_tokens=tuple(tokens[:num_received]))
                assert await served.tokens(resumed) == tokens[num_received:]
        with pytest.raises(InvalidRequest, match=r"^structured_output: .*forbids what the output already has"):
            await served.tokens(replace(jobs[0], resume_tokens=tuple(served.tokenizer.encode("def"))))
        await served.check_nothing_is_held()


@pytest.mark.ci
async def test_a_grammar_too_large_for_the_models_vocabulary_is_refused_by_its_field_and_others_go_on():
    grammar = Grammar(GrammarKind.REGEX, "(a{1000}){1000}")
    async with system(gamma=4) as served:
        prompt = served.tokenizer.encode("x = ")
        with pytest.raises(InvalidRequest, match=r"^structured_output: cannot be followed: "):
            await served.tokens(request(prompt, 64, grammar=grammar, ignore_eos=False))
        assert len(await served.tokens(request(prompt, 8))) == 8
        await served.check_nothing_is_held()


async def test_what_cuts_an_output_short_and_what_keeps_it_from_ending():
    digits = Grammar(GrammarKind.REGEX, "[0-9]{30}|ab|cd")
    async with system(gamma=4) as served:
        job = request(served.tokenizer.encode("x = "), 64, grammar=digits, ignore_eos=False)
        biased = Sampling(temperature=0.0, logit_bias=tuple((token, 30.0) for token in served.tokenizer.encode("a")))
        ((tokens, text, reason),) = await outputs(served, [replace(job, sampling=biased)])
        assert (text, reason) == ("ab", FinishReason.STOP)
        never_ends = replace(biased, min_tokens=20, suppressed_ids=(EOS,))
        assert await outputs(served, [replace(job, sampling=never_ends)]) == [(tokens, "ab", FinishReason.STOP)]
        ones = Sampling(temperature=0.0, logit_bias=tuple((token, 30.0) for token in served.tokenizer.encode("1")))
        ((_, text, reason),) = await outputs(served, [replace(job, sampling=ones, max_tokens=5)])
        assert (set(text), reason) == ({"1"}, FinishReason.LENGTH)
        ((_, text, reason),) = await outputs(served, [replace(job, sampling=ones, stop=("111",))])
        assert (text, reason) == ("", FinishReason.STOP)
        banned = replace(biased, logit_bias=(*biased.logit_bias, (EOS, -100.0)))
        assert await outputs(served, [replace(job, sampling=banned)]) == [(tokens, "ab", FinishReason.STOP)]
        a_or_more = replace(job, grammar=Grammar(GrammarKind.REGEX, "a{1,40}"))
        ((tokens, text, _),) = await outputs(served, [replace(a_or_more, sampling=never_ends)])
        assert len(tokens) > 20, "min_tokens holds where the grammar lets something else come"
        assert set(text) == {"a"}
        await served.check_nothing_is_held()


async def test_a_stream_beside_others_is_masked_alone():
    """And waits for its grammar alone: many are compiled while others are decoded."""
    async with system(gamma=3) as served:
        prompt = served.tokenizer.encode("import os\n")
        free = [request(prompt, 24, sampling=Sampling(temperature=0.7, seed=seed)) for seed in range(4)]
        bound = [
            replace(job, grammar=Grammar(GrammarKind.REGEX, f"(a|b){{4,8}}{number}"), ignore_eos=False)
            for number, job in enumerate(free)
        ]
        alone = [await served.tokens(job) for job in [*free, *bound]]
        assert await asyncio.gather(*map(served.tokens, [*free, *bound])) == alone
        await served.check_nothing_is_held()
