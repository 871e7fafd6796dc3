"""A draft learns to agree with its target, is written as transformers reads it, and is refused where it cannot."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.config import EngineConfig
from core.errors import StartupError, UnsupportedModel, VocabularyMismatch
from tests import checkpoints
from workers.model import reference_model
from workers.training import DraftJob, DraftPlan, DraftSize, TrainingText, Watcher, make_draft
from workers.training.draft.distillation import DraftLearner, check_packing, compared, measure_agreement
from workers.training.packing import packed
from workers.training.trainer import Trainer

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
PLAN = DraftPlan(num_steps=3, length=48, batch=1, learning_rate=3e-3, objective="coupled")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


def texts_of(num, size=20, seed=0):
    ids = torch.randint(0, 256, (num, size), generator=torch.Generator().manual_seed(seed)).tolist()
    return [TrainingText(each, [(4, size)], "text") for each in ids]


def job_of(target, draft, folder, **changes):
    job = DraftJob(target=EngineConfig(str(target)), draft=draft, texts=texts_of(24), plan=PLAN, work=folder / "work")
    return replace(job, **changes)


def steps_of(job, out):
    seen = []
    figures = make_draft(job, out, "outrider distill ...", Watcher(trained=seen.append))
    return seen, figures


def test_a_draft_learns_its_target_and_its_card_says_so(target, draft, tmp_path):
    plan = replace(PLAN, num_steps=40, learning_rate=1e-2)
    texts = [TrainingText(list(range(40, 72)), [(8, 32)], "chat", 0.8) for _ in range(24)]
    _, (before, after) = steps_of(job_of(target, draft, tmp_path, plan=plan, texts=texts), tmp_path / "out")
    was, now = before["chat", 0.8], after["chat", 0.8]
    assert now.num_tokens == 2 * 24
    assert list(now.by_rule) == [
        (0.0, "greedy"),
        *((temperature, rule) for temperature in (0.7, 1.0) for rule in ("rejection", "coupled")),
    ]
    for key, share in now.by_rule.items():
        assert share > was.by_rule[key] + 0.1, key
    card = (tmp_path / "out/README.md").read_text()
    assert f"| chat | 0.8 | 48 | {now.by_rule[0.0, 'greedy']:.3f} | " in card
    assert "| chat, before | 0.8 | 48 | " in card
    assert "outrider distill ..." in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(("size", "header"), [(None, "apache-2.0"), (DraftSize(1, 64), "mit")])
def test_the_card_names_the_licences_of_what_the_draft_is_made_from(tmp_path, size, header):
    target, draft = (checkpoints.write("llama", tmp_path / name) for name in ("target", "draft"))
    (target / "LICENSE").write_text("MIT License\n")
    (draft / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    steps_of(job_of(target, size or draft, tmp_path), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith(f"---\nlicense: {header}\n")
    assert f"says them: target: mit{', draft: apache-2.0' * (size is None)}.\n" in card


@pytest.mark.parametrize("size", [None, DraftSize(1, 64)])
def test_the_draft_is_a_checkpoint_that_transformers_reads(target, draft, tmp_path, size):
    _, (_, found) = steps_of(job_of(target, size or draft, tmp_path), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the")["input_ids"]
    if size:
        assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 64)
        assert model.config.vocab_size == checkpoints.SIZES["vocab_size"]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o044 == 0o044
    teacher = reference_model(EngineConfig(str(target)))
    written = measure_agreement(teacher, model, texts_of(24)[::20], PLAN.length)
    assert written.by_rule == pytest.approx(found["text", 0.0].by_rule, abs=1e-5), "the figures are the file's"


def test_texts_of_one_sequence_are_compared_as_if_each_stood_alone(target, draft):
    teacher, student = (reference_model(EngineConfig(str(each))) for each in (target, draft))
    texts = texts_of(2, size=10)
    (one,) = packed(texts, None, 24)
    with torch.inference_mode():
        both = compared(teacher, student, one, one.texts >= 0, 0.7)
        for model, found in zip((teacher, student), both, strict=True):
            alone = torch.cat([model(torch.tensor([text.token_ids])).logits[0] for text in texts])
            torch.testing.assert_close(found, (alone / 0.7).log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_only_the_draft_is_trained(target, draft, tmp_path):
    teacher, student = (reference_model(EngineConfig(str(each))) for each in (target, draft))
    kept = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    Trainer(DraftLearner(student, teacher.requires_grad_(False), PLAN)).train(
        texts_of(6), None, lambda _: None, tmp_path / "checkpoint.pt"
    )
    assert all(torch.equal(tensor, kept[name]) for name, tensor in teacher.state_dict().items())
    assert not torch.equal(student.lm_head.weight, reference_model(EngineConfig(str(draft))).lm_head.weight)


def test_a_training_goes_on_with_more_steps_and_begins_anew_for_another_objective(target, draft, tmp_path):
    job = job_of(target, draft, tmp_path)
    first, _ = steps_of(job, tmp_path / "a")
    more, _ = steps_of(replace(job, plan=replace(PLAN, num_steps=5)), tmp_path / "b")
    other, _ = steps_of(replace(job, plan=replace(PLAN, objective="kl")), tmp_path / "c")
    new, _ = steps_of(replace(job, draft=DraftSize(1, 64)), tmp_path / "d")
    assert [[each.step for each in steps] for steps in (first, more, other, new)] == [
        [1, 2, 3],
        [4, 5],
        [1, 2, 3],
        [1, 2, 3],
    ]


@pytest.mark.slow  # processes that import torch: as test_two_processes_train_one_head, which shares the code
def test_two_processes_train_one_draft(target, draft, tmp_path):
    seen, (_, after) = steps_of(job_of(target, draft, tmp_path, num_processes=2), tmp_path / "out")
    assert [each.step for each in seen] == [1, 2, 3]
    assert after["text", 0.0].num_tokens > 0


def test_training_stops_at_a_number_that_is_none(target, draft, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.lm_head.weight.data[3] = float("nan")
    model.save_pretrained(broken)
    with pytest.raises(StartupError, match="not a number"):
        steps_of(job_of(target, broken, tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_draft_with_another_vocabulary_is_refused(target, tmp_path):
    small = checkpoints.write("llama", tmp_path / "small", vocab_size=200, **dict.fromkeys(SPECIAL, 1))
    with pytest.raises(VocabularyMismatch, match=r"vocab_size is 200 in .*small, but .* has 300 tokens"):
        steps_of(job_of(target, small, tmp_path), tmp_path / "out")
    other = checkpoints.write("llama", tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|end|>", "<|stop|>"))
    with pytest.raises(VocabularyMismatch, match=r"token id 299 is '<\|end\|>'"):
        steps_of(job_of(target, other, tmp_path), tmp_path / "out")


def test_a_draft_may_have_more_or_fewer_rows_of_padding(target, tmp_path):
    padded = checkpoints.write("llama", tmp_path / "padded", vocab_size=320)
    seen, _ = steps_of(job_of(target, padded, tmp_path), tmp_path / "out")
    assert len(seen) == PLAN.num_steps


def test_a_model_in_which_packed_texts_see_each_other_is_refused():
    with pytest.raises(UnsupportedModel, match=r"--draft: .*MambaForCausalLM"):
        check_packing(checkpoints.build("mamba"), "--draft")
    check_packing(checkpoints.build("gpt2"), "--draft")
