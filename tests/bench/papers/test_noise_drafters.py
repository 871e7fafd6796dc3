"""One-pass drafters: whose noise is read where, what a block sees, and that replayed rounds are real ones."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.papers.noise.networks import BlockDrafter, LookAhead, OneLayer
from bench.papers.noise.rounds import TargetText, accepted_lengths, draw, draw_texts, guesses_of, tokens_a_round
from bench.papers.noise.training import BlockLearner
from core import noise
from core.config import EngineConfig
from core.noise import Purpose
from core.records import Sampling
from core.rules.coupled import verify_coupled
from core.speculation import TokenTree
from tests import checkpoints
from workers.model import reference_model
from workers.training import HeadPlan, Progress, TrainingText
from workers.training.head.features import read_states
from workers.training.packing import PackedTexts, pack
from workers.training.trainer import Trainer

NUM, SEED, VOCAB = 3, 7, 8


def shared_draw(place: int) -> int:
    """Return the token of the largest noise, which both models draw if all tokens are equally likely."""
    return int(np.argmax(noise.gumbel(SEED, place, 0, Purpose.SHARED, VOCAB)))


OUTPUT = [shared_draw(place) for place in range(2, 12)]
TEXT = TargetText([1, 2, *OUTPUT], torch.zeros(10, VOCAB), Sampling(seed=SEED))
"""Of a target to which all tokens are alike, so that the noise alone is its output."""


def test_each_guess_is_drawn_with_the_noise_of_its_own_place() -> None:
    """The first round knows one token of the output, at place 2; the last one's bonus token is the text's last."""
    guesses = guesses_of(TEXT, torch.zeros(6, NUM, VOCAB), reads_noise=True)
    assert guesses == [[shared_draw(first + depth) for depth in range(NUM)] for first in (3, 4, 5, 6, 7, 8)]
    assert accepted_lengths(TEXT, guesses) == [NUM] * 6, "the target draws with the same noise"


def test_without_the_noise_the_largest_logit_is_guessed() -> None:
    guesses = guesses_of(TEXT, torch.eye(VOCAB)[5].expand(6, NUM, VOCAB), reads_noise=False)
    assert guesses == [[5] * NUM] * 6
    right = [[token == 5 for token in OUTPUT[first : first + NUM]] for first in range(1, 7)]
    assert accepted_lengths(TEXT, guesses) == [[*each, False].index(False) for each in right]


def test_a_round_ends_after_its_accepted_guesses_and_the_next_token() -> None:
    lengths = [[2, 0, 1, 3, 0]]
    assert tokens_a_round(lengths, 2) == (3 + 3) / 2
    assert tokens_a_round(lengths, 1) == (2 + 2 + 1) / 3
    assert tokens_a_round(lengths, 2, num_free=1) == (4 + 2) / 2


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = checkpoints.write("llama", tmp_path_factory.mktemp("llama"))
    return reference_model(EngineConfig(str(folder))).requires_grad_(False)


def packed_of(target: Any, token_ids: Sequence[int], folder: Path) -> PackedTexts:
    texts = [TrainingText(list(token_ids), [(0, len(token_ids))])]
    return pack(texts, [0], len(token_ids), read_states(target, texts, folder))


def block_drafter(target: Any, rank: int) -> BlockDrafter:
    torch.manual_seed(0)
    network = BlockDrafter(target, NUM, rank, num_layers=1).requires_grad_(False)
    if network._after is not None:
        torch.nn.init.normal_(network._after.weight)
    return network


@torch.inference_mode()
def real_round(target: Any, network: BlockDrafter, text: TargetText, anchor: int, folder: Path) -> int:
    """Draft below the text's beginning, then verify by a pass of the target over all that was guessed."""
    begun = text.token_ids[: anchor + 2]
    guesses = network.guess(packed_of(target, begun, folder), anchor, text.rows(range(anchor + 2, anchor + 2 + NUM)))
    logits = target(torch.tensor([begun + guesses])).logits[0, -NUM - 1 :].float()
    samples = draw(logits, text.rows(range(anchor + 2, anchor + 3 + NUM)))
    return len(verify_coupled(TokenTree.chain(guesses), samples).path)


def test_rounds_along_a_text_accept_what_real_rounds_accept(target: Any, tmp_path: Path) -> None:
    """At a high temperature the noise decides most draws, so that a network that has learned nothing is often right."""
    network = block_drafter(target, rank=4)
    (text,) = draw_texts(target, torch.tensor([[5, 6, 7, 8]]), 20, 20.0)
    one, anchors = packed_of(target, text.token_ids, tmp_path), text.anchors(NUM)
    with torch.inference_mode():
        found = accepted_lengths(text, guesses_of(text, network.scores(one, anchors, NUM), reads_noise=True))
    assert found == [real_round(target, network, text, anchor, tmp_path) for anchor in anchors.tolist()]
    assert len(set(found)) > 1


def changed(one: PackedTexts, token: int, feature: int) -> PackedTexts:
    """The text with other tokens and other features from these places on."""
    places = torch.arange(len(one.token_ids))
    states = torch.where(places[:, None] >= feature, -one.states, one.states)
    return replace(one, token_ids=one.token_ids + (places >= token), states=states)


def test_a_block_sees_the_features_up_to_its_anchor_and_the_token_after_it(target: Any, tmp_path: Path) -> None:
    network, anchors = block_drafter(target, rank=0), torch.tensor([4])
    one = packed_of(target, range(40, 56), tmp_path)
    scores = network.scores(one, anchors, NUM)
    torch.testing.assert_close(network.scores(changed(one, 6, 5), anchors, NUM), scores)
    assert not torch.allclose(network.scores(changed(one, 5, 5), anchors, NUM), scores)
    assert not torch.allclose(network.scores(changed(one, 6, 4), anchors, NUM), scores)
    together = network.scores(one, torch.tensor([2, 4, 9]), NUM)
    torch.testing.assert_close(together[1:2], scores)


def test_look_ahead_rows_are_rows_of_the_targets_own_pass(target: Any, tmp_path: Path) -> None:
    network, one = LookAhead(target, NUM).requires_grad_(False), packed_of(target, range(40, 56), tmp_path)
    torch.nn.init.normal_(network._look_ahead.weight)
    rows = torch.cat([target.get_input_embeddings()(one.token_ids[:6]), network._look_ahead.weight])
    expected = target(inputs_embeds=rows[None]).logits[0, -NUM:]
    torch.testing.assert_close(network.scores(one, torch.tensor([5, 9]), NUM)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_separate_draft_reads_the_text_alone_as_a_model_of_the_last_layer_does(target: Any, tmp_path: Path) -> None:
    network, one = OneLayer(target).requires_grad_(False), packed_of(target, range(40, 56), tmp_path)
    scores = network.scores(one, torch.tensor([3, 7]), NUM)
    torch.testing.assert_close(network.scores(changed(one, 99, 0), torch.tensor([3, 7]), NUM), scores)
    smaller = deepcopy(target)
    smaller.base_model.layers = smaller.base_model.layers[-1:]
    smaller.base_model.layers[0].self_attn.layer_idx = 0
    expected = smaller(input_ids=one.token_ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(scores, torch.stack([expected[4:7], expected[8:11]]), rtol=1e-4, atol=1e-4)


MADE = {
    "block": lambda target: BlockDrafter(target, NUM, 4, 1),
    "look-ahead": lambda target: LookAhead(target, NUM),
    "one layer": OneLayer,
}


@pytest.mark.parametrize("name", MADE)
def test_one_pass_drafters_learn(target: Any, name: str, tmp_path: Path) -> None:
    texts = [TrainingText(list(range(40, 72)), [(0, 32)])] * 4
    plan = HeadPlan(num_steps=40, unrolled=NUM, length=32, batch=2, learning_rate=1e-2)
    output: Tensor = target.get_output_embeddings().weight
    seen: list[Progress] = []
    learner = BlockLearner(MADE[name](target), output, plan)
    Trainer(learner).train(texts, read_states(target, texts, tmp_path), seen.append, tmp_path / "saved.pt")
    late = int(plan.mass_from * plan.num_steps)
    assert seen[late - 1].loss < 0.9 * seen[0].loss, "the divergence from the target's distribution"
    assert len(seen[-1].right) == NUM
