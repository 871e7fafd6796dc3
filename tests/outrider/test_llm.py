"""Batches in this process give the target's own tokens, whatever shares their steps; wrong arguments are named."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.errors import ConfigError, DeadlinePassed, InvalidRequest
from deploy.receipts import Outcome, compare
from deploy.receipts.making import digest_of_tokens
from outrider import LLM, SamplingParams
from tests.reference import generate, search

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = ["import os", "def read_lines(path):", "class Point:\n    def __init__(self, x", "x = [", "    return self."]
STATIC = {
    "speculation.policy": "static",
    "speculation.max_draft_tokens": 4,
    "speculation.draft_timeout_s": 30.0,
    "speculation.breaker_rounds": 1000,
}
"""The adaptive policy would rest on a busy machine, and late drafts would be left: nothing would be drafted."""


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO / "target", draft=DEMO / "draft", settings={**STATIC, "limits.max_sessions": 4}) as llm:
        yield llm


def test_greedy_is_what_transformers_generate(llm):
    outputs = llm.generate(PROMPTS, max_tokens=24, temperature=0, ignore_eos=True)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [output.token_ids for output in outputs] == [
        tuple(generate(DEMO / "target", each.prompt_token_ids, 24)) for each in outputs
    ]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert sum(output.outputs[0].stats.num_accepted_tokens for output in outputs) > 0
    assert sum(sum(output.outputs[0].is_guess) for output in outputs) > 0


@pytest.mark.thorough
def test_a_seed_gives_the_tokens_of_plain_decoding_alone(llm):
    params = [SamplingParams(max_tokens=24, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(5)]
    together = [output.token_ids for output in llm.generate(PROMPTS, params)]
    alone = [
        llm.generate(prompt, max_tokens=24, temperature=0.9, seed=seed, ignore_eos=True, max_draft_tokens=0)[
            0
        ].token_ids
        for seed, prompt in enumerate(PROMPTS)
    ]
    assert together == alone


def test_an_output_says_with_which_seed_it_comes_again(llm):
    both = llm.generate(PROMPTS[0], max_tokens=12, temperature=1.0, n=2, ignore_eos=True)[0].outputs
    again = [llm.generate(PROMPTS[0], max_tokens=12, temperature=1.0, seed=each.seed, ignore_eos=True) for each in both]
    assert [each.token_ids for each in both] == [found[0].token_ids for found in again]
    assert [each.index for each in both] == [0, 1]


def test_prompts_may_be_ids_and_outputs_stop_and_tell_probabilities(llm):
    text = llm.generate(PROMPTS[1], max_tokens=24, temperature=0)[0]
    ids = llm.generate([text.prompt_token_ids], max_tokens=24, temperature=0, logprobs=1, prompt_logprobs=0)[0]
    assert ids.text == text.text
    assert len(ids.outputs[0].logprobs) == len(ids.token_ids)
    assert len(ids.prompt_logprobs) == len(ids.prompt_token_ids) - 1
    stop = text.text.strip()[:3]
    stopped = llm.generate(PROMPTS[1], max_tokens=24, temperature=0, stop=stop)[0]
    assert (stopped.finish_reason, stopped.outputs[0].matched_stop) == ("stop", stop)
    assert stop not in stopped.text


def test_beams_give_the_outputs_of_transformers_best_first(llm):
    found = llm.generate(PROMPTS[:2], beam_width=3, n=2, max_tokens=12, ignore_eos=True, length_penalty=0.0)
    for each in found:
        assert [list(output.token_ids) for output in each.outputs] == search(
            DEMO / "target", each.prompt_token_ids, 12, num_beams=3, num_return_sequences=2, length_penalty=0.0
        )
        assert [output.index for output in each.outputs] == [0, 1]
        assert each.outputs[0].score > each.outputs[1].score
    assert llm.generate(PROMPTS[0], max_tokens=2)[0].outputs[0].score is None


def test_an_output_comes_with_the_receipt_by_which_it_comes_again(llm):
    fields = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "receipt": True}
    (request,) = llm.generate(["import os"], n=2, **fields)
    first, second = (output.receipt for output in request.outputs)
    assert (first["model"], first["prompt_tokens"]) == (llm.config.model_name, len(request.prompt_token_ids))
    assert first["prompt_digest"] == digest_of_tokens(request.prompt_token_ids)
    assert first["output_digest"] == digest_of_tokens(request.token_ids)
    assert (first["sampling"]["seed"], second["sampling"]["seed"]) == tuple(each.seed for each in request.outputs)
    assert first["target"]["digest"] != first["draft"]["digest"]
    again = llm.generate(["import os"], max_draft_tokens=0, **fields)[0].outputs[0]
    kept = json.loads(json.dumps(first))
    assert compare(kept, again.receipt, request.token_ids, again.token_ids).outcome is Outcome.SAME


def test_an_output_comes_with_a_line_for_each_decision_if_asked(llm):
    silent, explained = (
        llm.generate("import os", max_tokens=8, explain=asked)[0].outputs[0] for asked in (False, True)
    )
    assert silent.explanation == ()
    assert silent.receipt is None
    assert explained.explanation


def test_a_template_is_guessed_and_changes_no_output(llm):
    fields = {"max_tokens": 24, "temperature": 0}
    plain = llm.generate("import os", **fields, max_draft_tokens=0)[0]
    fields["template"] = re.escape(plain.text)
    guessed = [llm.generate("import os", **fields, guessers=("template",))[0] for _ in range(2)][1]
    assert guessed.token_ids == plain.token_ids
    (found,) = guessed.outputs[0].stats.sources
    assert (found.name, found.num_failures) == ("template", 0)
    assert found.num_accepted_tokens > 5
    with pytest.raises(InvalidRequest, match=r"^template: cannot be followed: .*unclosed group"):
        llm.generate("import os", template="(a")


def test_the_drafts_temperature_changes_no_output(llm):
    fields = {"max_tokens": 16, "temperature": 0.9, "seed": 5}
    plain, drafted = (llm.generate("import os", draft_temperature=each, **fields)[0] for each in (None, 0.5))
    assert plain.token_ids == drafted.token_ids


def test_an_output_may_be_held_to_a_grammar(llm):
    assert llm.generate("version = ", choice=["one", "two"], temperature=0)[0].text in ("one", "two")


def test_what_the_grammar_of_an_output_forces_is_guessed(llm):
    schema = {"type": "object", "properties": {"version": {"type": "boolean"}}, "required": ["version"]}
    schema["additionalProperties"] = False
    fields = {"json_schema": schema, "temperature": 0, "max_tokens": 40}
    by_grammar = {"guessers": ("grammar",)}  # of which nothing is guessed until it is compiled, in the first of these
    _, guessed, plain = (
        llm.generate("x = ", **fields, **given)[0] for given in (by_grammar, by_grammar, {"max_draft_tokens": 0})
    )
    found = {source.name: source for source in guessed.outputs[0].stats.sources}
    assert found["grammar"].num_accepted_tokens > 0
    assert guessed.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"temperature": -1.0}, r"^temperature: must be 0 \(greedy\) or in \[0.001, 100\], got -1.0 \(prompts\[0\]\)"),
        ({"max_tokens": 0}, r"^max_tokens: must be in \[1, 2047\]"),
        ({"max_tokens": "many"}, r"^max_tokens: .*valid integer.*got 'many'"),
        ({"temprature": 1.0}, r"^temprature: there is no such argument"),
        ({"regex": "a", "choice": ["b"]}, r"^choice: cannot be given beside regex"),
        ({"guessers": ("draft", "oracle")}, r"^guessers\[1\]: must be one of draft, .*, got 'oracle'"),
        ({"lenience": 0.5}, r"^lenience: must not be given with coupled"),
        ({"beam_width": 2, "n": 3}, r"^n: must be in \[1, 2\] \(the number of beams\)"),
        ({"length_penalty": 1.0}, r"^length_penalty: must not be given without beams.beam_width"),
        ({"beam_width": 2, "early_stopping": "soon"}, r"^early_stopping: .*'when_full' or 'never'"),
        ({"source": "a"}, r"^source: must not be given: .* without an encoder"),
        ({"source": (5,)}, r"^source: must not be given: .* without an encoder"),
    ],
)
def test_wrong_parameters_are_named(llm, fields, problem):
    with pytest.raises(InvalidRequest, match=problem):
        llm.generate(["a"], **fields)


def test_wrong_prompts_are_named_and_nothing_runs(llm):
    num_steps = llm.stats()["target"].num_steps
    for prompts, problem in (
        (["a", ""], r"^prompts\[1\]: must hold"),
        (["a", [1, 10**6]], r"^prompts\[1\]: must be in \[0"),
        (["a " * 5000], r"^prompts\[0\]: must be at most"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            llm.generate(prompts, max_tokens=4)
    with pytest.raises(InvalidRequest, match=r"^params: must be one, or one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequest, match=r"^max_tokens: cannot be given beside params"):
        llm.generate(["a"], SamplingParams(), max_tokens=3)
    assert llm.stats()["target"].num_steps == num_steps
    assert llm.generate([]) == []


def test_a_failure_ends_the_call_frees_what_it_held_and_the_next_one_runs(llm):
    with pytest.raises(DeadlinePassed) as found:
        llm.generate(PROMPTS * 4, max_tokens=1500, ignore_eos=True, timeout_s=0.3)
    assert found.value.__notes__[0].startswith("while going on from prompt-")
    assert len(llm.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)[0].token_ids) == 4
    assert is_soon_free(llm)


@pytest.fixture
def _interruptible():
    """Use Python's own handler. A shell makes what it runs in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_ends_what_was_asked_for(llm):
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 4, max_tokens=1500, ignore_eos=True)
    assert len(llm.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)[0].token_ids) == 4
    assert is_soon_free(llm)


def is_soon_free(llm):
    """Whether the engines hold nothing; leases are given back a moment after the last piece."""
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        if all(each.num_sessions == 0 and each.num_free_blocks == each.num_blocks for each in llm.stats().values()):
            return True
        time.sleep(0.01)
    return False


def test_it_closes_once_and_says_so():
    llm = LLM(DEMO / "target", settings={"target.engine.num_threads": 1}, progress=False)
    assert llm.config.draft is None
    assert len(llm.generate("a", max_tokens=2, ignore_eos=True)[0].token_ids) == 2
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="is closed"):
        llm.generate("a")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"target": "nowhere"}, "^target: there is no directory nowhere"),
        ({"target": DEMO / "target", "draft": "nowhere"}, "^draft: there is no directory"),
        ({"draft": DEMO / "draft"}, "^draft: give its target"),
        ({"settings": {"target.engine.dtyp": 1}}, r"target.engine.dtyp: there is no such setting \(settings\["),
        ({"settings": {"target.engine.tensor_parallel": 2}}, "^target.engine.tensor_parallel must be 1"),
        (
            {"settings": {"extra_drafts": [{"engine": {"model": str(DEMO / "draft")}}]}},
            "^extra_drafts must be empty in one process",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, problem):
    with pytest.raises(ConfigError, match=problem):
        LLM(**arguments)


def test_its_import_needs_neither_torch_nor_ray_nor_grpc():
    code = "import sys, outrider; print(sorted({'torch', 'ray', 'grpc'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.thorough
def test_a_script_that_does_not_close_ends_in_silence():
    code = f"""
from outrider import LLM
llm = LLM({str(DEMO / "target")!r}, draft={str(DEMO / "draft")!r})
print(len(llm.generate("import os", max_tokens=4, ignore_eos=True)[0].token_ids))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, "4", "")
