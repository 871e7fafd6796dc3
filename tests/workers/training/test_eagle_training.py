"""The head that is trained is the head that is served; training goes on where it stopped, and stops at NaN."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError, StartupError, UnsupportedModel
from core.records import Features
from core.speculation import TokenTree
from tests import checkpoints, eagle
from workers.heads import read_head
from workers.model import reference_model
from workers.runtime import load_head_runtime
from workers.step import StepRows
from workers.training import HeadJob, HeadPlan, TrainingText, Watcher, job, make_head, trainer
from workers.training.head.eagle3 import Eagle3
from workers.training.head.features import read_states, tapped
from workers.training.head.objective import TEMPERATURE, AcceptedMass, SoftCrossEntropy
from workers.training.head.run import teacher_of
from workers.training.head.starting import first_weights, shape_of
from workers.training.head.teaching import HeadLearner
from workers.training.head.unrolling import unrolled
from workers.training.head.writer import write_head
from workers.training.packing import packed
from workers.training.trainer import Trainer

VOCABULARY = sorted({3, 250, *range(20, 140)})
DEPTH = 4
INNER = "intermediate_size"  # the tests' checkpoints state it for every family
PLAN = HeadPlan(num_steps=6, unrolled=2, length=48, batch=1, learning_rate=3e-3)


@pytest.fixture(scope="module")
def model(checkpoint_once):
    return reference_model(EngineConfig(checkpoint_once))


@pytest.fixture(scope="module")
def checkpoint_once(tmp_path_factory):
    return str(checkpoints.write("llama", tmp_path_factory.mktemp("llama")))


def texts_of(num, size=20, seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (num, size), generator=random).tolist()
    return [TrainingText(each, [(4, size)], "text") for each in ids]


def random_head(model):
    """Weights that bfloat16 holds, so that the written file has the same."""
    shape = shape_of(model)
    random = torch.Generator().manual_seed(5)
    tensors = {
        name: (0.3 * torch.randn(size, generator=random) + (len(size) == 1)).bfloat16().float()
        for name, size in shape.tensors().items()
    }
    return Eagle3(shape, tensors)


@pytest.mark.parametrize("borrows", [True, False])
def test_unrolled_steps_are_those_of_the_served_head(model, checkpoint_once, tmp_path, borrows):
    """Two texts in one sequence: each chain of the text's own tokens, from each row, by the engine's own passes."""
    head, teacher, texts = random_head(model), teacher_of(model, VOCABULARY), texts_of(2, size=14)
    states = read_states(model, texts, tmp_path)
    (one,) = packed(texts, states, 32)
    output = teacher.output if borrows else teacher.output.bfloat16().float()  # as the file has it
    with torch.inference_mode():
        steps = [states @ output.T for states, _ in unrolled(head, teacher, one, DEPTH)]
    write_head(tmp_path / "head", head.shape, model.config, head.tensors(), VOCABULARY, None if borrows else output)
    config = EngineConfig(checkpoint_once, head=str(tmp_path / "head"), block_tokens=4, kv_cache_tokens=256)
    runtime = load_head_runtime(config, lambda _: None)
    for index, text in enumerate(texts):
        offset = index * len(text.token_ids)
        for row in (0, 3, 8):
            for step, logits in enumerate(served(runtime, text.token_ids, states.of(index), row)):
                torch.testing.assert_close(logits[VOCABULARY], steps[step][offset + row], atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def served(runtime, token_ids, states, row):
    """Logits of a chain that starts below the token at `row` + 1, and guesses the text's own tokens."""
    width, kv = runtime.info.feature_width, runtime.cache.new_sequence()
    rows = states[: row + 1, :width].contiguous().view(torch.uint8).numpy().tobytes()
    yield runtime.forward([StepRows(kv, token_ids[: row + 2], features=Features(0, width, rows))])[0]
    for step in range(1, DEPTH):
        chain = TokenTree.chain(token_ids[row + 2 : row + 2 + step])
        yield runtime.forward([StepRows(kv, [], chain, num_cached_nodes=step - 1)])[0]
    runtime.cache.free(kv)


def test_the_reader_finds_the_layers_of_a_target_of_few_layers(model, checkpoint_once, tmp_path):
    assert (tapped(30), tapped(7)) == ((2, 15, 27), (2, 3, 4))
    assert (tapped(6), tapped(2)) == ((0, 3, -1), (0, 1, -1))
    with pytest.raises(ConfigError, match="1 layer"):
        tapped(1)
    head = random_head(model)
    write_head(tmp_path / "head", head.shape, model.config, head.tensors(), VOCABULARY, None)
    assert read_head(str(tmp_path / "head"), checkpoint_once).feature_layers == (0, 1, -1)


@pytest.mark.parametrize("is_mass", [True, False])
def test_gradients_of_losses_are_those_of_their_formulas(is_mass):
    torch.manual_seed(2)
    states, output = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    teacher = torch.randn(5, 30).softmax(-1)
    loss, guesses = (AcceptedMass if is_mass else SoftCrossEntropy).apply(states, output, teacher)
    slopes = torch.autograd.grad(loss, (states, output))
    logits = states @ output.T
    if is_mass:
        expected = -torch.minimum(teacher, (logits / TEMPERATURE).softmax(-1)).sum(-1).log().sum()
    else:
        expected = (logits.logsumexp(-1) - (teacher * logits).sum(-1)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slopes, torch.autograd.grad(expected, (states, output)))
    assert guesses.tolist() == logits.argmax(-1).tolist()


def trainer_of(model, plan):
    shape = shape_of(model)
    head, teacher = Eagle3(shape, first_weights(model, shape)), teacher_of(model, VOCABULARY)
    return Trainer(HeadLearner(head, partial(unrolled, head, teacher), teacher, plan))


def weights_of(trained):
    return trained._learner.module.tensors()


def test_a_second_training_goes_on_from_the_first_ones_last_step(model, tmp_path):
    texts, saved, seen = texts_of(6), tmp_path / "checkpoint.pt", []
    states = read_states(model, texts, tmp_path)
    first = trainer_of(model, PLAN)
    first.train(texts, states, seen.append, saved)
    second = trainer_of(model, replace(PLAN, num_steps=9))
    second.train(texts, states, seen.append, saved)
    assert [each.step for each in seen] == list(range(1, 10))
    again = trainer_of(model, replace(PLAN, num_steps=9))
    again.train(texts, states, seen.append, saved)
    assert len(seen) == 9, "nothing is left to do"
    for name, tensor in weights_of(again).items():
        assert torch.equal(tensor, weights_of(second)[name])


def test_a_training_that_was_stopped_ends_as_if_it_had_not_been(model, tmp_path, monkeypatch):
    """It reads the texts in the same order, from where it was."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 2)
    texts = texts_of(5)
    states = read_states(model, texts, tmp_path)
    whole = trainer_of(model, PLAN)
    whole.train(texts, states, lambda _: None, tmp_path / "whole.pt")

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_of(model, PLAN).train(texts, states, stop, tmp_path / "stopped.pt")
    resumed, steps = trainer_of(model, PLAN), []
    resumed.train(texts, states, steps.append, tmp_path / "stopped.pt")
    assert [each.step for each in steps] == [3, 4, 5, 6]
    for name, tensor in weights_of(whole).items():
        assert torch.equal(tensor, weights_of(resumed)[name])


def test_the_optimizers_go_on_as_well(model, tmp_path):
    texts, saved = texts_of(6), tmp_path / "checkpoint.pt"
    states = read_states(model, texts, tmp_path)
    first, second = trainer_of(model, PLAN), trainer_of(model, PLAN)
    first.train(texts, states, lambda _: None, saved)
    second._resume(saved)
    for one, other in zip(first._optimizers, second._optimizers, strict=True):
        assert str(one.state_dict()["state"]) == str(other.state_dict()["state"]) != "{}"


def test_training_stops_at_a_number_that_is_none(model, tmp_path):
    texts = texts_of(6)
    states = read_states(model, texts, tmp_path)
    states._rows = torch.full_like(states._rows, float("nan"))
    with pytest.raises(StartupError, match=r"^training step 0: the loss or its gradient is not a number"):
        trainer_of(model, PLAN).train(texts, states, lambda _: None, tmp_path / "checkpoint.pt")
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_checkpoint_of_another_head_is_refused(model, tmp_path):
    texts, saved = texts_of(4), tmp_path / "checkpoint.pt"
    states = read_states(model, texts, tmp_path)
    torch.save({"weights": {"_weights.0": torch.zeros(2)}, "step": 3, "optimizers": []}, saved)
    with pytest.raises(StartupError, match=r"checkpoint\.pt is of another model"):
        trainer_of(model, PLAN).train(texts, states, lambda _: None, saved)


def job_of(checkpoint, folder, texts, **changes):
    target = EngineConfig(checkpoint)
    return HeadJob(
        **{"target": target, "texts": texts, "plan": PLAN, "num_draft_tokens": 120, "work": folder / "work"} | changes
    )


def test_a_head_learns_texts_that_repeat_and_its_card_says_so(checkpoint_once, tmp_path):
    texts = [TrainingText(list(range(40, 72)), [(0, 32)], "text") for _ in range(24)]
    plan, seen = replace(PLAN, num_steps=40, batch=2), []
    one = job_of(checkpoint_once, tmp_path, texts, plan=plan)
    found = make_head(one, tmp_path / "head", "outrider train-head ...", Watcher(trained=seen.append))
    assert seen[-1].loss < 0.8 * seen[0].loss
    config = read_head(str(tmp_path / "head"), checkpoint_once)
    assert (config.draft_vocab_size, config.hidden_size) == (120, eagle.HIDDEN)
    card = (tmp_path / "head/README.md").read_text()
    assert "outrider train-head ..." in card
    assert f"| text | 0 | {found['text', 0.0].num_tokens} |" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(
    ("family", "changes"),
    [("cohere", {}), ("granite", {"logits_scaling": 4.0}), ("gemma2", {"final_logit_softcapping": 0.5})],
)
def test_a_target_with_other_logits_than_its_output_layers_is_refused(tmp_path, family, changes):
    """The head would be taught a distribution that no target of it has."""
    target = str(checkpoints.write(family, tmp_path / family, **changes))
    with pytest.raises(UnsupportedModel, match=r"--target: .*ForCausalLM scales or caps its logits"):
        make_head(job_of(target, tmp_path, texts_of(9)), tmp_path / "head", "", Watcher())


@pytest.mark.parametrize("changed", ["target", "texts", "vocabulary"])
def test_what_was_trained_for_something_else_is_not_taken(checkpoint_once, tmp_path, changed):
    """In one work directory: states and checkpoints are those of the same target, texts and vocabulary."""
    one, steps = job_of(checkpoint_once, tmp_path, texts_of(9), plan=replace(PLAN, num_steps=2)), []
    if changed == "target":
        other = checkpoints.write("llama", tmp_path / "other", seed=1)
        changes = {"target": replace(one.target, model=str(other))}
    else:
        changes = {"texts": texts_of(9, seed=1)} if changed == "texts" else {"num_draft_tokens": 90}
    for number, each in enumerate((one, replace(one, **changes), one)):
        make_head(each, tmp_path / f"head{number}", "", Watcher(trained=steps.append))
    assert [each.step for each in steps] == [1, 2, 1, 2]
    alone = replace(one, **changes, work=tmp_path / "alone")
    make_head(alone, tmp_path / "alone-head", "", Watcher())
    found, expected = (tmp_path / name / "model.safetensors" for name in ("head1", "alone-head"))
    assert found.read_bytes() == expected.read_bytes()


def test_too_few_texts_are_refused(checkpoint_once, tmp_path):
    with pytest.raises(ConfigError, match="too few texts"):
        make_head(job_of(checkpoint_once, tmp_path, texts_of(1)), tmp_path / "head", "", Watcher())
    silent = [replace(text, spans=[]) for text in texts_of(9)]
    with pytest.raises(ConfigError, match="no token to be guessed"):
        make_head(job_of(checkpoint_once, tmp_path, silent), tmp_path / "head", "", Watcher())


def test_a_head_is_trained_for_a_target_whose_configuration_names_no_inner_width(tmp_path):
    target = str(checkpoints.write("gpt2", tmp_path / "gpt2"))
    file = tmp_path / "gpt2/config.json"
    file.write_text(json.dumps({key: each for key, each in json.loads(file.read_text()).items() if key != INNER}))
    one = job_of(target, tmp_path, texts_of(9), plan=replace(PLAN, num_steps=1))
    make_head(one, tmp_path / "head", "", Watcher())
    assert read_head(str(tmp_path / "head"), target).hidden_size == checkpoints.SIZES["hidden_size"]


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("cuda:0", "--device cuda:0 is one GPU for 2 processes; --device cuda takes one for each"),
        ("cuda", "--device cuda: --processes 2, but torch finds 1 GPUs"),
        ("gpu", "--device: "),
    ],
)
def test_each_process_needs_a_gpu_of_its_own(checkpoint_once, tmp_path, monkeypatch, device, problem):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    target = EngineConfig(checkpoint_once, device=device)
    with pytest.raises(ConfigError) as found:
        make_head(
            job_of(checkpoint_once, tmp_path, texts_of(9), target=target, num_processes=2),
            tmp_path / "head",
            "",
            Watcher(),
        )
    assert str(found.value).startswith(problem)


def test_two_processes_train_one_head(checkpoint_once, tmp_path):
    seen = []
    one = job_of(checkpoint_once, tmp_path, texts_of(9), num_processes=2, plan=replace(PLAN, num_steps=3))
    make_head(one, tmp_path / "head", "", Watcher(trained=seen.append))
    assert [each.step for each in seen] == [1, 2, 3]
    assert (tmp_path / "head/model.safetensors").exists()


def test_a_process_that_ends_early_ends_the_training(checkpoint_once, tmp_path, monkeypatch):
    """Before its first step, too: here the second one, at a token that the target does not have."""
    monkeypatch.setattr(job, "TIMEOUT", timedelta(seconds=60))
    texts = texts_of(9)
    texts[2].token_ids[2] = 10**6
    for _ in range(2):  # nothing is left of the first
        with pytest.raises(StartupError, match="another process of the training has ended"):
            make_head(job_of(checkpoint_once, tmp_path, texts, num_processes=2), tmp_path / "head", "", Watcher())
