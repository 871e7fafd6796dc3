"""Workloads are the texts that they are called, they come out as they were recorded, and each goal is judged once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.control import replay, workload_texts, workloads
from bench.control.alone import measure_guesser
from bench.control.guesser_table import Row, draw, table
from bench.control.recorder import Recorded, Recorder
from bench.control.replay import PLAIN_WAY, GuessingWay, Job, decode
from bench.control.workload_texts import Workload
from core.config import EngineConfig, SpeculationConfig
from core.records import Grammar, GrammarKind, Sampling, Verification
from core.speculation import NO_GUESSES, Guesses, TokenTree
from deploy.measure import Plan, Recording, survey
from deploy.settings import DEMO_DIRECTORY
from orchestrator.text import Tokenizer
from simulation.engines import Agreement

VOCAB_SIZE = 50
PROMPT = "def read_lines(path):"
TEXT = [5 + place * 7 % 40 for place in range(40)]
NEVER = 1 << 20


def agreements(ranks):
    return [Agreement(rank=rank, plain_rank=rank, alpha=float(rank == 0), confidence=0.9) for rank in ranks]


def job(output, ranks, prompt=(1, 2, 3), second=()):
    """One text, of which the draft has the next token at these ranks, and a second draft at others."""
    recording = Recording(tuple(prompt), tuple(output), np.zeros((len(output), VOCAB_SIZE)))
    return Job(recording, 0.0, (agreements(ranks), agreements(second)))


def by(*names):
    return GuessingWay(SpeculationConfig(guessers=names))


def test_a_draft_that_is_always_right_is_used_and_one_that_never_is_gains_nothing():
    right, wrong = (job(TEXT, [rank] * len(TEXT)) for rank in (0, NEVER))
    plain = decode([right], PLAIN_WAY, VOCAB_SIZE)
    assert plain.report.tokens_per_round == 1.0
    assert decode([right], by("draft"), VOCAB_SIZE).report.tokens_per_round > 4
    found = decode([wrong], by("draft"), VOCAB_SIZE)
    assert found.report.tokens_per_round == 1.0
    assert sum(found.accepted.values()) == 0


@pytest.mark.ci
def test_texts_that_come_before_teach_the_service_and_are_not_counted():
    jobs = [job(TEXT, [NEVER] * len(TEXT)), job(TEXT, [0] * len(TEXT))]
    whole, later = (decode(jobs, by("draft"), VOCAB_SIZE, num_before=number) for number in (0, 1))
    assert (whole.report.num_tokens, later.report.num_tokens) == (2 * len(TEXT), len(TEXT))
    assert later.accepted == whole.accepted, "nothing was right in the first"
    assert later.drafted["draft"] < whole.drafted["draft"]


def test_a_second_draft_guesses_where_the_first_is_wrong():
    both = job(TEXT, [NEVER] * len(TEXT), second=[0] * len(TEXT))
    found = decode([both], GuessingWay(SpeculationConfig(guessers=("draft",)), (0, 1)), VOCAB_SIZE)
    assert found.report.tokens_per_round > 2
    assert found.accepted["draft_2"] > found.accepted["draft"] == 0


def test_a_text_that_repeats_its_prompt_is_looked_up():
    words = [10 + place * 3 % 37 for place in range(37)]
    copied = job(words, [NEVER] * len(words), prompt=(*words, 1))
    looked_up = decode([copied], by("prompt_lookup"), VOCAB_SIZE)
    assert looked_up.report.tokens_per_round > 3
    assert set(looked_up.accepted) == {"prompt_lookup"}
    assert 0.5 < looked_up.first_accepted <= 1.0


def test_a_text_that_comes_out_changed_is_no_result(monkeypatch):
    text = list(range(5, 25))
    unchanged = replay.ReplayText._position

    def off_by_one(self, prefix_hash, index, seed, is_true):
        return unchanged(self, prefix_hash, max(index - 1, 0), seed, is_true)

    monkeypatch.setattr(replay.ReplayText, "_position", off_by_one)
    with pytest.raises(RuntimeError, match="text 0 came out changed"):
        decode([job(text, [0] * len(text))], by("draft"), VOCAB_SIZE)


def test_there_is_a_way_for_each_source_and_one_for_all():
    free = Recorded(Workload("code", 0.0, [""]), [], [])
    given = Recorded(Workload("edit", 0.0, [""], [""]), [], [])
    forced = Recorded(Workload("JSON", 0.0, [""], grammar=Grammar(GrammarKind.REGEX, "a")), [], [])
    names = {"draft", "prompt_lookup", "ngram", "suffix", "retrieval"}
    for recorded, own in ((free, {"lookahead"}), (given, set()), (forced, {"lookahead", "grammar"})):
        found = workloads.ways(recorded, "index")
        sources = found.pop(workloads.AUTOMATIC).speculation.guessers
        assert set(sources) == names | own
        second = {name for name, way in found.items() if way.drafts != (0,)}
        assert set(found) - second == set(sources)
        assert all(found[name].speculation.guessers == (name,) for name in sources)


class FromList:
    """Says these, one after the other."""

    def __init__(self, answers):
        self._answers = iter(answers)

    def propose(self, text):
        return next(self._answers, NO_GUESSES)


def test_a_guesser_alone_is_judged_by_its_likeliest_first_guess():
    text = Recording((1,), (2, 3, 4, 5), np.zeros((4, VOCAB_SIZE)))
    answers = [
        Guesses((-1, -1, 1), (9, 2, 3), (0.2, 0.7, 1.0)),
        NO_GUESSES,
        Guesses((-1,), (9,), (1.0,)),
        Guesses((-1,), (5,), (1.0,)),
    ]
    assert measure_guesser(lambda _: FromList(answers), [text]).alpha == 0.5


def row(way, over_plain, **figures):
    return Row("code, T = 0", way, 0.5, 2.0, over_plain, **figures)


ROWS = [
    row("draft", 2.0, alpha=0.7, promised=1.8, in_turn=1.5),
    row("ngram", 1.5, guess_us=12.4, memory_kb=80.2),
    row("automatic", 2.2, accepted={"draft": 30, "ngram": 10, "suffix": 0}),
]
TWO_KINDS = [*ROWS, *(replace(each, workload="prose, T = 1") for each in ROWS[1:])]


def test_each_measure_has_a_table_and_so_has_what_the_automatic_choice_used():
    parts = table(TWO_KINDS).split("\n\n")
    assert [part.splitlines()[2:] for part in parts[1::2]] == [
        ["| `draft` | 2.00 |  |", "| `ngram` | 1.50 | 1.50 |", "| `automatic` | 2.20 | 2.20 |"],
        ["| `draft` | 2.00 |  |", "| `ngram` | 2.00 | 2.00 |", "| `automatic` | 2.00 | 2.00 |"],
        ["| `draft` | 0.50 |  |", "| `ngram` | 0.50 | 0.50 |", "| `automatic` | 0.50 | 0.50 |"],
        ["| `draft` | 0.70: 1.80, 1.50 |"],
        ["| `ngram` | 12, 80 | 12, 80 |"],
        ["| `draft` | 75% | 75% |", "| `ngram` | 25% | 25% |"],
    ]


def test_the_picture_has_a_panel_for_each_kind_and_a_bar_for_each_way(tmp_path):
    draw(TWO_KINDS, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert drawn.count(">2.20</text>") == 2
    assert drawn.count(">2.00</text>") == 1
    assert "prose, T = 1" in drawn


def test_goals_are_judged_against_the_best_single_source():
    [found] = workloads.judged([*ROWS, row("second draft", 9.0)])
    assert (found.name, found.goal, found.met, found.value) == ("code, T = 0: automatic over draft", 0.98, True, 1.1)


def test_two_drafts_are_judged_against_the_better_one_and_a_mix_has_a_goal_of_its_own():
    drafts = [row("second draft", 2.5), row("two drafts", 3.0)]
    _, found = workloads.judged([*ROWS, *drafts])
    assert (found.name, found.goal, found.value) == ("code, T = 0: two drafts over second draft", None, 1.2)
    [mixed] = workloads.judged([replace(each, workload=workloads.MIX) for each in ROWS])
    assert mixed.goal == 1.1


def test_where_texts_are_copied_a_lookup_is_judged_against_the_draft():
    copying = [row("prompt_lookup", 2.8), row("suffix", 3.2)]
    _, found = workloads.judged([replace(each, workload="copy-heavy editing, T = 0") for each in [*ROWS, *copying]])
    assert (found.name, found.goal, found.value) == ("copy-heavy editing, T = 0: suffix over draft", 1.5, 1.6)


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
    shown = json.loads(found["JSON", 0.0].prompts[1])
    assert set(shown[0]) == set(json.loads(found["JSON", 0.0].grammar.text)["items"]["required"])
    assert found["docstring prose", 0.0].prompts[0].startswith('    """')


@pytest.mark.ci
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
        [(found, _)] = recorder.record(Workload("code", temperature, [PROMPT])).agreements
        assert len(found) == 16
        assert sum(each.rank == 0 for each in found) / 16 == pytest.approx(alpha)
        assert all(0 <= each.alpha <= 1 and 0 < each.confidence <= 1 for each in found)
    given = recorder.record(Workload("edit", 0.0, [PROMPT], ["    return path\n"]))
    assert given.texts[0].output == recorder._tokenizer.encode("    return path\n")


@pytest.mark.ci
@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_answers_questions_as_it_would_have_written(temperature):
    """A block that is the text itself is answered with the text, masks of a grammar and noise included."""
    recorder = Recorder(DEMO_DIRECTORY, 16)
    schema = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 8}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    workload = Workload("JSON", temperature, ["[1, 2]\n"], grammar=grammar)
    [text] = recorder.record(workload).texts
    state, sampling = recorder.state(workload.grammar), Sampling(temperature=temperature, seed=0)
    assert len(text.output) > 9
    for start in (0, 1, 5):
        tokens, rest = [*text.prompt, *text.output[:start]], text.output[start : start + 4]
        found = recorder.target.samples(tokens, len(text.prompt), TokenTree.chain(rest), sampling, state)
        assert found[: len(rest)] == rest
