"""Beam search through real engines and sessions: outputs and scores are those of transformers."""

from __future__ import annotations

import pytest
import torch
from local import noisy_copy, request, system

from core.records import BeamSearch, FinishReason, Sampling
from tests import checkpoints
from tests.checkpoints import EOS, VOCAB_SIZE

PROMPT = [5, 6, 7, 8, 9]
SOURCE = [20, 31, 22, 43, 24, 35]
GREEDY = Sampling(temperature=0.0)
MILD = {"mt5": {"initializer_factor": 2.0}, "bart": {"init_std": 0.5}}
"""Changes that keep scores small: float32 has seven digits."""
NUM_TOKENS = 20


@pytest.fixture(scope="module", params=["llama", "bart", "mt5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(family, tmp_path_factory):
    return checkpoints.write(family, tmp_path_factory.mktemp(family), vocab_size=VOCAB_SIZE, **MILD.get(family, {}))


def asked(family, search, **changes):
    is_pair = family in checkpoints.ENCODER_DECODERS
    prompt = [*SOURCE, 0] if is_pair else PROMPT
    fields = {"num_source": len(SOURCE) if is_pair else 0, "sampling": GREEDY, "beams": search, "ignore_eos": False}
    return request(prompt, NUM_TOKENS, **fields | changes)


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


@pytest.mark.parametrize("width", [2, 4])
async def test_drafting_changes_no_output_and_saves_passes(family, target, tmp_path, width):
    draft = noisy_copy(target, tmp_path)
    search = BeamSearch(width, width)
    async with system(target, None) as running:
        want = await running.complete(asked(family, search))
    async with system(target, draft) as running:
        chunks = await running.complete(asked(family, search))
        await running.check_nothing_is_held()
    assert [(each.token_ids, each.finish_reason) for each in chunks] == [(e.token_ids, e.finish_reason) for e in want]
    assert [each.score for each in chunks] == pytest.approx([each.score for each in want], abs=1e-4)
    print(chunks[0].stats)
