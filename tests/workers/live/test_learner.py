"""A draft learns what it missed, keeps what it knew, and is left alone if its training comes to nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_texts import follower, text_of, texts
from safetensors.torch import load_file, save_file

from core.errors import StartupError
from tests.checkpoints import write
from workers.live import Learner, LearningPlan, agreement, load_draft, without_hits
from workers.live.loss import missed_loss

PLAN = LearningPlan(num_steps=60, batch=8, learning_rate=1e-2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("llama", tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    torch.manual_seed(0)
    learner = Learner(checkpoint)
    learner.train(texts(64), PLAN)
    folder = tmp_path_factory.mktemp("trained") / "0001"
    learner.write(folder)
    return folder


def test_the_loss_is_the_divergence_where_all_tokens_are_given():
    torch.manual_seed(1)
    logits, target = torch.randn(5, 8), torch.randn(5, 8).log_softmax(-1)
    ids = target.argsort(-1, descending=True)
    loss = missed_loss(logits, ids, target.gather(1, ids))
    expected = torch.nn.functional.kl_div(logits.log_softmax(-1), target, log_target=True, reduction="sum")
    assert float(loss) == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize("num_top", [1, 3, 8])
def test_the_loss_is_zero_and_flat_at_the_target(num_top):
    torch.manual_seed(2)
    logits = torch.randn(5, 8, requires_grad=True)
    top = logits.detach().log_softmax(-1).topk(num_top)
    loss = missed_loss(logits, top.indices, top.values)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert float(logits.grad.abs().max()) < 1e-5


def test_a_draft_learns_what_it_missed(checkpoint, trained):
    held_out = texts(16, seed=9)
    before, after = (agreement(load_draft(each), held_out) for each in (checkpoint, trained))
    assert before.num_tokens == after.num_tokens == 16 * 20
    assert before.share < 0.2
    assert after.share > 0.4
    assert after.missed_share > 0.4


def test_a_written_draft_has_the_files_and_the_type_of_the_one_before(checkpoint, trained):
    assert {file.name for file in trained.iterdir()} == {file.name for file in Path(checkpoint).iterdir()}
    assert (trained / "config.json").read_text() == (Path(checkpoint) / "config.json").read_text()
    weights = [load_file(Path(each) / "model.safetensors") for each in (checkpoint, trained)]
    assert {name: each.dtype for name, each in weights[0].items()} == {
        name: each.dtype for name, each in weights[1].items()
    }


def test_a_loss_that_is_no_number_is_refused(checkpoint, tmp_path):
    for file in Path(checkpoint).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: torch.full_like(weights[name], torch.nan)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="step 0: the loss or its gradient is not a number"):
        Learner(tmp_path).train(texts(4), PLAN)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(StartupError, match="cannot be trained"):
        Learner(tmp_path)


def test_boosting_leaves_out_the_places_that_another_draft_has(trained):
    """The trained draft knows the rule, but not what breaks it."""
    text = text_of(11)
    odd = replace(text, top_ids=[[0, 1, 2], *text.top_ids[1:]])
    (left,) = without_hits(load_draft(trained), [odd])
    assert 4 in left.missed
    assert len(left.missed) < len(odd.missed) / 2
    assert all(len(each) == len(left.missed) for each in (left.top_ids, left.top_logprobs))
    assert left.token_ids == odd.token_ids
    assert follower(odd.token_ids[3]) == odd.token_ids[4]
