"""Beam search through real engines and sessions: outputs and scores are those of transformers."""

from __future__ import annotations

import asyncio
import math
import shutil
from dataclasses import replace

import pytest
import torch
from local import noisy_copy, request, system
from safetensors.torch import load_file, save_file

from core.config import SpeculationConfig
from core.errors import UnsoundScores
from core.records import BeamSearch, Call, FinishReason, Grammar, GrammarKind, Sampling
from orchestrator.session.beams.beam_drafts import BeamDrafts
from tests import checkpoints
from tests.checkpoints import EOS, VOCAB_SIZE
from workers.engine.target import TargetEngine

PROMPT = [5, 6, 7, 8, 9]
SOURCE = [20, 31, 22, 43, 24, 35]
GREEDY = Sampling(temperature=0.0)
MILD = {"mt5": {"initializer_factor": 1.0}, "bart": {"init_std": 0.2}}
"""Changes that keep scores small: float32 has seven digits."""
NUM_TOKENS = 20


FAMILIES = pytest.mark.parametrize("family", ["llama", "bart", "mt5"], scope="module")


@pytest.fixture(scope="module", params=["llama", pytest.param("bart", marks=pytest.mark.slow), "mt5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(family, tmp_path_factory):
    return checkpoints.write(family, tmp_path_factory.mktemp(family), vocab_size=VOCAB_SIZE, **MILD.get(family, {}))


def asked(family, search, **changes):
    is_pair = family in checkpoints.ENCODER_DECODERS
    prompt = [*SOURCE, 0] if is_pair else PROMPT
    fields = {"num_source": len(SOURCE) if is_pair else 0, "sampling": GREEDY, "beams": search, "ignore_eos": False}
    return request(prompt, **{"max_tokens": NUM_TOKENS} | fields | changes)


def of_transformers(family, search, eos=EOS, **settings):
    model = checkpoints.build(family, vocab_size=VOCAB_SIZE, **MILD.get(family, {}))
    is_pair = family in checkpoints.ENCODER_DECODERS
    ids = torch.tensor([SOURCE if is_pair else PROMPT])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            num_beams=search.width,
            num_return_sequences=search.num_outputs,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **settings,
        )
    first, ends = 1 if is_pair else len(PROMPT), [eos] if isinstance(eos, int) else eos
    return [
        (_up_to(tokens[first:].tolist(), ends), score)
        for tokens, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True)
    ]


def _up_to(tokens, ends):
    return next((tokens[: number + 1] for number, token in enumerate(tokens) if token in ends), tokens)


def assert_same(chunks, want):
    assert [list(chunk.token_ids) for chunk in chunks] == [tokens for tokens, _ in want]
    assert [chunk.score for chunk in chunks] == pytest.approx([score for _, score in want], abs=1e-4, rel=1e-5)


@FAMILIES
@pytest.mark.parametrize("width", [1, 2, 5])
async def test_outputs_and_scores_are_those_of_generate(family, target, width):
    search = BeamSearch(width, width)
    async with system(target, None) as running:
        chunks = await running.complete(asked(family, search))
        await running.check_nothing_is_held()
    if width > 1:  # one beam of transformers is greedy decoding, which has no scores
        assert_same(chunks, of_transformers(family, search))
    assert [chunk.output for chunk in chunks] == list(range(width))
    assert {chunk.finish_reason for chunk in chunks} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert chunks[0].stats.num_rounds == NUM_TOKENS


@pytest.fixture
def draft(target, tmp_path):
    return noisy_copy(target, tmp_path)


def told(chunks):
    return [(chunk.token_ids, chunk.finish_reason, chunk.text) for chunk in chunks]


async def searched(target, draft, wanted, **settings):
    async with system(target, draft, **settings) as running:
        chunks = await running.complete(wanted)
        await running.check_nothing_is_held()
    return chunks


@FAMILIES
@pytest.mark.parametrize("width", [2, 4])
async def test_drafting_changes_no_output(family, target, draft, width):
    wanted = asked(family, BeamSearch(width, width))
    want = await searched(target, None, wanted)
    chunks = await searched(target, draft, wanted)
    assert told(chunks) == told(want)
    assert [each.score for each in chunks] == pytest.approx([each.score for each in want], abs=1e-4)
    assert chunks[0].stats.num_drafted_tokens > 0


async def test_a_draft_that_is_the_target_saves_passes(family, target):
    chunks = await searched(target, target, asked(family, BeamSearch(3, 3)))
    stats = chunks[0].stats
    assert stats.num_rounds < NUM_TOKENS
    assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens


async def test_searches_of_one_width_share_whether_drafting_pays(family, target, draft):
    async with system(target, draft, speculation=SpeculationConfig(policy="adaptive")) as running:
        known = running.service._beam_paces[2]
        for is_drafted, seconds in ((False, 0.001), (True, 100.0)):
            known.observe(is_drafted, seconds, 1)
        (chunk,) = await running.complete(asked(family, BeamSearch(2, 1), max_tokens=8))
    assert (chunk.stats.num_rounds, chunk.stats.num_drafted_tokens) == (8, 0)
    assert known._num_rounds == 2 + 7, "all but the first, which reads the prompt"


@pytest.mark.parametrize(("width", "asked_for", "depth"), [(2, None, 4), (4, None, 2), (4, 6, 6)])
async def test_the_more_beams_the_less_deep_their_trees(family, target, monkeypatch, width, asked_for, depth):
    depths, grow = set(), BeamDrafts.grow

    def spy(drafts, beams, depth, *rest):
        depths.add(depth)
        return grow(drafts, beams, depth, *rest)

    monkeypatch.setattr(BeamDrafts, "grow", spy)
    await searched(target, target, asked(family, BeamSearch(width, 1), max_draft_tokens=asked_for), gamma=8)
    assert max(depths) == depth


async def test_without_draft_tokens_nothing_is_drafted(family, target, draft):
    chunks = await searched(target, draft, asked(family, BeamSearch(3, 3), max_draft_tokens=0))
    assert (chunks[0].stats.num_rounds, chunks[0].stats.num_drafted_tokens) == (NUM_TOKENS, 0)


@pytest.mark.parametrize("settings", [{"kv_cache_tokens": 128, "block_tokens": 4}, {"max_step_tokens": 6}])
async def test_searches_side_by_side_change_nothing(family, target, draft, settings):
    """Also where they preempt each other, and where a step has not room for all of their nodes' prompts."""
    wanted = [asked(family, BeamSearch(2, 2)), asked(family, BeamSearch(3, 1)), asked(family, BeamSearch(2, 1))]
    want = [await searched(target, None, each) for each in wanted]
    async with system(target, draft, **settings) as running:
        found = await asyncio.gather(*map(running.complete, wanted))
        await running.check_nothing_is_held()
    assert list(map(told, found)) == list(map(told, want))


@pytest.mark.parametrize("name", ["target", "draft"])
async def test_a_crash_changes_nothing(family, target, draft, name):
    wanted = asked(family, BeamSearch(3, 3))
    want = await searched(target, None, wanted)
    async with system(target, draft) as running:
        stream = asyncio.ensure_future(running.complete(wanted))
        await until_under_way(running)
        old = running.leases.engines[name]
        kind = type(old)
        extra = () if kind is TargetEngine else (64,)
        await running.leases.replace_engine(name, kind.load(old._config, 9, *extra, lambda _: None))
        assert told(await stream) == told(want)
        await running.check_nothing_is_held()


async def until_under_way(running):
    """Until the target has made a few passes."""
    while (await running.leases.loops["target"].ask(lambda engine: engine.stats())).num_steps < 3:  # noqa: ASYNC110  engines have threads
        await asyncio.sleep(0.001)


async def test_a_client_that_leaves_frees_all_leases(family, target, draft):
    async with system(target, draft) as running:
        stream = asyncio.ensure_future(running.complete(asked(family, BeamSearch(4, 4))))
        await until_under_way(running)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        await running.check_nothing_is_held()


async def test_log_probabilities_are_those_of_the_beam(family, target):
    chunks = await searched(target, None, asked(family, BeamSearch(3, 2, length_penalty=0.0), num_logprobs=2))
    for chunk in chunks:
        assert sum(each.logprob for each in chunk.logprobs) == pytest.approx(chunk.score, abs=1e-3)
        assert {len(each.top) for each in chunk.logprobs} == {2}
        assert all(each.top[0][1] >= each.logprob for each in chunk.logprobs)


async def test_tokens_that_end_an_output_end_a_beam(family, target):
    plain = await searched(target, None, asked(family, BeamSearch(3, 3)))
    end = plain[0].token_ids[4]
    search = BeamSearch(3, 3, length_penalty=0.0)  # the short ones score best
    wanted = asked(family, search, stop_token_ids=frozenset({end}), ignore_eos=True)
    chunks = await searched(target, None, wanted)
    assert_same(chunks, of_transformers(family, search, end))
    stopped = [chunk for chunk in chunks if chunk.finish_reason is FinishReason.STOP]
    assert {chunk.matched_stop for chunk in stopped} == {end}


async def test_a_grammar_holds_all_outputs_and_may_allow_fewer_than_asked_for(family, target):
    grammar = Grammar(GrammarKind.REGEX, "a|b")
    chunks = await searched(target, None, asked(family, BeamSearch(3, 3), grammar=grammar))
    assert {chunk.text for chunk in chunks[:2]} == {"a", "b"}
    assert (chunks[2].text, chunks[2].problem.field) == ("", "n")


@pytest.mark.parametrize("with_draft", [False, True])
async def test_a_beam_that_nothing_may_follow_is_dropped(family, target, draft, with_draft):
    """A grammar says what follows "c", and it is a bad word."""
    grammar = Grammar(GrammarKind.REGEX, "ab|cd")
    async with system(target, draft if with_draft else None) as running:
        (last,) = running.tokenizer.encode("d", add_special_tokens=False)
        wanted = asked(family, BeamSearch(3, 2), grammar=grammar, sampling=replace(GREEDY, bad_words=((last,),)))
        first, second = await running.complete(wanted)
        await running.check_nothing_is_held()
    assert (first.text, first.finish_reason) == ("ab", FinishReason.STOP)
    assert (second.text, second.problem.field) == ("", "n")


async def test_a_search_fails_where_a_beam_has_nan(family, target, tmp_path):
    """Though another beam has none."""
    if family != "llama":
        pytest.skip("one family has the weights by this name")
    chunks = await searched(target, None, asked(family, BeamSearch(2, 2)))
    token = chunks[1].token_ids[0] if chunks[1].token_ids[0] != chunks[0].token_ids[0] else chunks[0].token_ids[1]
    async with system(poisoned(target, tmp_path, token), None) as running:
        with pytest.raises(UnsoundScores, match="NaN"):
            await running.complete(asked(family, BeamSearch(2, 2)))
        await running.check_nothing_is_held()


def poisoned(checkpoint, directory, token):
    """A copy of the model that gives NaN wherever it has read `token`."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = math.nan
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


async def test_the_calls_of_a_search_are_reported_for_its_spans(family, target, draft):
    chunks = await searched(target, draft, asked(family, BeamSearch(2, 2), wants_trace=True))
    stats, calls = chunks[0].stats, [call for call in chunks[0].trace if call.call is Call.VERIFY]
    assert {call.call for call in chunks[0].trace} == {Call.VERIFY, Call.BLOCK}
    assert len(calls) == stats.num_rounds
    assert sum(call.num_guesses for call in calls) == stats.num_drafted_tokens > 0
    assert sum(call.num_used for call in calls) == stats.num_accepted_tokens
    assert all(0 <= call.sent_s <= call.received_s and call.timing.num_rows for call in calls)
    assert chunks[0].began_s is not None


async def test_explained_passes_say_what_they_cost(family, target, draft):
    chunks = await searched(target, draft, asked(family, BeamSearch(2, 1), wants_explanation=True))
    assert chunks[0].explanation[0].startswith("pass 1: 1 token longer; 2 beams live")
    assert len(chunks[0].explanation) == chunks[0].stats.num_rounds
