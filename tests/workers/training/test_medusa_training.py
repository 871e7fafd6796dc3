"""Medusa's heads: those that are trained are those that are served, and they learn."""

from __future__ import annotations

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints
from workers.heads import load_head, read_head
from workers.model import reference_model
from workers.training import HeadJob, HeadPlan, TrainingText, Watcher, make_head
from workers.training.head.features import read_states
from workers.training.head.medusa import MedusaHeads
from workers.training.head.writer import write_medusa
from workers.training.packing import packed

NUM_HEADS = 2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(checkpoints.write("llama", tmp_path_factory.mktemp("llama")))


def texts_of(num):
    return [TrainingText(list(range(40, 72)), [(0, 32)], "text") for _ in range(num)]


def test_guesses_in_training_are_those_of_the_served_heads(target, tmp_path):
    model = reference_model(EngineConfig(target))
    output = model.get_output_embeddings().weight.detach().bfloat16().float()  # as the file has it
    heads = MedusaHeads(output, NUM_HEADS)
    random = torch.Generator().manual_seed(3)
    for name, tensor in heads.tensors().items():
        if ".0.linear." in name:
            tensor.data = torch.randn(tensor.shape, generator=random).bfloat16().float()
    (one,) = packed(texts_of(1), read_states(model, texts_of(1), tmp_path), 32)
    write_medusa(tmp_path / "heads", heads.tensors(), NUM_HEADS, "target")
    served = load_head(str(tmp_path / "heads"), model.get_output_embeddings(), torch.float32, torch.device("cpu"))
    last = one.states[:, -output.shape[1] :].float()
    with torch.inference_mode():
        for depth, (states, layer) in enumerate(heads.steps(one, NUM_HEADS)):
            torch.testing.assert_close(states @ layer.T, served(last, depth))


def test_heads_learn_texts_that_repeat(target, tmp_path):
    plan, seen = HeadPlan(num_steps=40, unrolled=NUM_HEADS, length=48, batch=2, learning_rate=3e-3), []
    job = HeadJob(
        target=EngineConfig(target),
        texts=texts_of(24),
        plan=plan,
        num_draft_tokens=9,
        work=tmp_path / "work",
        kind="medusa",
    )
    found = make_head(job, tmp_path / "heads", "outrider train-head ...", Watcher(trained=seen.append))
    assert seen[-1].loss < 0.8 * seen[0].loss
    assert len(found["text", 0.0].by_depth) == NUM_HEADS
    read_head(str(tmp_path / "heads")).check_target(*output_size(target))
    card = (tmp_path / "heads/README.md").read_text()
    assert "# Medusa heads for" in card
    assert "outrider train-head ..." in card


def output_size(target):
    vocab_size, hidden_size = reference_model(EngineConfig(target)).get_output_embeddings().weight.shape
    return hidden_size, vocab_size
