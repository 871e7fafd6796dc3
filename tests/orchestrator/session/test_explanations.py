"""A stream explains its decisions if asked, and decides the same if not."""

from __future__ import annotations

import re
from dataclasses import replace

from core.config import SpeculationConfig
from core.records import Chunk, Usage
from orchestrator.session import messages as m
from orchestrator.session.recorder import MAX_LINES, Recorder
from tests.orchestrator.fakes import plain
from tests.orchestrator.session.test_in_turn import CONFIG, PROMPT, Stage

CHUNK = Chunk("", (5,), (False,), Usage(3, 1))
ADAPTIVE = SpeculationConfig(policy="adaptive", max_draft_tokens=3, guessers=("draft",))


def lines(stage):
    return [line for command in stage.sent if isinstance(command, Chunk) for line in command.explanation]


def in_turn(tokenizer, config=CONFIG, **changes):
    stage = Stage(tokenizer, config=config, wants_explanation=True, **changes)
    stage.grown()
    return stage


def test_each_round_has_a_line_with_its_block_its_reason_and_what_stood(tokenizer):
    stage = in_turn(tokenizer)
    for _ in range(4):
        stage.verdict()
        stage.grown()
    assert lines(stage)[0] == "prefill: a target takes in 3 tokens, and no guesses"
    for number, line in enumerate(lines(stage)[1:], 1):
        assert re.fullmatch(
            rf"round {number}: waited for the draft, at most \d+ ms: the block is to be drafted first; "
            r"3 guesses, 3 deep \(draft 3\): policy always; [0-3] accepted",
            line,
        )
    assert len(lines(stage)) == 4
    assert stage.tokens == plain(PROMPT, len(stage.tokens))


def test_adaptive_control_gives_the_figures_that_decided(tokenizer):
    stage = in_turn(tokenizer, replace(ADAPTIVE, pipelining=False))
    for _ in range(3):
        stage.verdict()
        if any(isinstance(command, m.Await) for command in stage.sent[-3:]):
            stage.grown()
    text = "\n".join(lines(stage))
    assert re.search(r"worth \d+\.\d\d tokens, and -?\d+\.\d\d ms more of the pass at \d+ tokens/s cost", text)
    assert "passes in turn are forecast to yield the most tokens a second" in text


def test_a_stream_that_decodes_plainly_says_what_was_forecast(tokenizer):
    stage = in_turn(tokenizer, replace(ADAPTIVE, pipelining=False))
    stage.session._policy._learned.accepted.value = 0.0
    stage.session._policy._num_trials = 0
    for _ in range(3):
        stage.verdict()
    pattern = r"round \d: plain decoding is forecast to make (\d+) tokens/s, drafting in turn (\d+); no guesses: .*"
    found = [match for line in lines(stage) if (match := re.fullmatch(pattern, line))]
    assert found, lines(stage)
    assert all(int(match[1]) > int(match[2]) for match in found)


def test_the_last_token_needs_no_guess(tokenizer):
    stage = in_turn(tokenizer, max_tokens=2)
    stage.verdict()
    stage.verdict()
    assert lines(stage)[-1].endswith("no guesses: one token is left")


def test_what_is_left_and_why(tokenizer):
    stage = in_turn(tokenizer)
    stage.verdict()
    stage.event(m.DraftLate(stage.last(m.Await).stamp))
    stage.verdict()
    stage.event(m.DraftLost(1))
    stage.event(m.TargetLost(stage.session._target._view.epoch, "killed"))
    stage.target.forget(stage.session._target._view.name)
    stage.event(m.TargetLeased("t2", 1))
    stage.verdict()
    text = "\n".join(lines(stage))
    assert "the draft did not answer in time; no guesses" in text
    assert "the draft was left, as its engine is gone; another is asked" in text
    assert "the target was left (killed), and another is asked" in text


def test_there_is_a_bound_and_the_last_line_says_so():
    recorder = Recorder(is_explained=True)
    for number in range(2 * MAX_LINES):
        recorder.draft_rested(str(number))
    taken = recorder.add_to(CHUNK).explanation
    assert len(taken) == MAX_LINES
    assert taken[-1] == f"no more: {MAX_LINES} lines are explained of a stream"
    assert recorder.add_to(CHUNK).explanation == ()
