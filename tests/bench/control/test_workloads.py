"""Workloads are the texts that they are called, they come out as they were recorded, and each goal is judged once."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.control import workload_texts, workloads
from bench.control.workload_texts import Recorder, Workload
from bench.control.workloads import AUTOMATIC, PLAIN, Job, decode
from core.config import EngineConfig
from core.records import Verification
from deploy.measure import Plan, Recording, survey
from deploy.settings import DEMO_DIRECTORY
from orchestrator.text import Tokenizer
from simulation.engines import Agreement

VOCAB_SIZE = 50
PROMPT = "def read_lines(path):"


def job(output, ranks, prompt=(1, 2, 3)):
    """One text, of which the draft has the next token at these ranks."""
    agreements = [Agreement(rank=rank, plain_rank=rank, alpha=float(rank == 0), confidence=0.9) for rank in ranks]
    return Job(Recording(tuple(prompt), tuple(output), np.zeros((len(output), VOCAB_SIZE))), 0.0, agreements)


def test_a_draft_that_is_always_right_is_used_and_one_that_never_is_gains_nothing():
    text = [5 + place * 7 % 40 for place in range(40)]
    right, wrong = (job(text, [rank] * len(text)) for rank in (0, 1 << 20))
    plain = decode([right], (), VOCAB_SIZE)
    assert plain.report.tokens_per_round == 1.0
    assert decode([right], ("draft",), VOCAB_SIZE).report.tokens_per_round > 4
    found = decode([wrong], ("draft",), VOCAB_SIZE)
    assert found.report.tokens_per_round == 1.0
    assert sum(found.accepted.values()) == 0


def test_a_text_that_repeats_its_prompt_is_looked_up():
    words = [10 + place * 3 % 37 for place in range(37)]
    copied = job(words, [1 << 20] * len(words), prompt=(*words, 1))
    looked_up = decode([copied], ("prompt_lookup",), VOCAB_SIZE)
    assert looked_up.report.tokens_per_round > 3
    assert set(looked_up.accepted) == {"prompt_lookup"}


def test_a_text_that_comes_out_changed_is_no_result(monkeypatch):
    text = list(range(5, 25))
    changed = workload_texts.ReplayText._place

    def off_by_one(self, prefix_hash, index, seed, is_true):
        return changed(self, prefix_hash, max(index - 1, 0), seed, is_true)

    monkeypatch.setattr(workload_texts.ReplayText, "_place", off_by_one)
    with pytest.raises(RuntimeError, match="text 0 came out changed"):
        decode([job(text, [0] * len(text))], ("draft",), VOCAB_SIZE)


def test_there_is_a_way_for_each_source_and_one_for_all():
    ways = workloads.sources()
    assert ways[PLAIN] == ()
    assert set(ways[AUTOMATIC]) == {name for name in ways if name not in (PLAIN, AUTOMATIC)}
    assert all(ways[name] == (name,) for name in ways[AUTOMATIC])


@pytest.mark.thorough
def test_the_workloads_are_what_they_are_called():
    found = {(each.name, each.temperature): each for each in workload_texts.workloads(2)}
    kinds = {name for name, _ in found}
    assert kinds == {"code completion", "docstring prose", "copy-heavy editing", "JSON", "high-entropy sampling"}
    edit = found["copy-heavy editing", 0.0]
    name = edit.prompts[0].split()[1]
    before, after = edit.prompts[0].partition("\n")[2].partition("\n\n# new:\n")[0], edit.outputs[0]
    assert after != before
    assert after.replace(f"new_{name}", name) == before.replace(f"new_{name}", name)
    text = found["JSON", 0.0]
    rows = json.loads(text.prompts[1].partition("\n")[2] + text.outputs[1])
    assert len(rows) == 14
    assert set(rows[0]) == set(json.loads(text.prompts[1].partition("\n")[0])["items"]["required"])
    assert found["docstring prose", 0.0].prompts[0].startswith('    """')


@pytest.mark.thorough
def test_recorded_agreement_is_what_a_survey_counts():
    """The share of places with rank 0 is coupled acceptance, greedily and with the shared noise."""
    prompt = Tokenizer.from_directory(DEMO_DIRECTORY / "target").encode(PROMPT)
    configs = (EngineConfig(str(DEMO_DIRECTORY / role), kv_cache_tokens=2048) for role in ("target", "draft"))
    measured = survey(Plan(*configs, [prompt], (0.0, 1.0), num_tokens=16, depth=1), lambda _: None)
    alphas = {
        each.temperature: each.agreement.alpha
        for each in measured.sources
        if (each.name, each.verification) == ("draft", Verification.COUPLED)
    }
    recorder = Recorder(DEMO_DIRECTORY, 16)
    for temperature, alpha in alphas.items():
        [agreements] = recorder.record(Workload("code", temperature, [PROMPT])).agreements
        assert len(agreements) == 16
        assert sum(each.rank == 0 for each in agreements) / 16 == pytest.approx(alpha)
        assert all(0 <= each.alpha <= 1 and 0 < each.confidence <= 1 for each in agreements)
    given = recorder.record(Workload("edit", 0.0, [PROMPT], ["    return path\n"]))
    assert given.texts[0].output == recorder._tokenizer.encode("    return path\n")


def test_goals_are_judged_against_the_best_single_source():
    text = [5 + place * 7 % 40 for place in range(40)]
    ways = {PLAIN: (), "draft": ("draft",), "ngram": ("ngram",), AUTOMATIC: ("draft", "ngram")}
    decoded = {way: decode([job(text, [0] * 40)], guessing, VOCAB_SIZE) for way, guessing in ways.items()}
    found = workloads._against_best("code", decoded, 0.98)
    assert (found.settings["best"], found.goal) == ("draft", 0.98)
    assert found.met == (found.value >= 0.98)
