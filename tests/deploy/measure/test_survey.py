"""A survey of the demo pair says what a plain computation says, and its command prints and writes all of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core import noise
from core.config import EngineConfig
from core.errors import ConfigError
from core.exact import Q_MASS
from core.noise import Purpose
from core.records import Verification
from deploy.cli import main
from deploy.cli.planning.simulate import SimulateOptions, scenario_of
from deploy.measure import Plan, survey
from deploy.settings import DEMO_DIRECTORY
from orchestrator.text import Tokenizer
from tests.deploy.cli.parsing import parsed

pytestmark = pytest.mark.thorough

TARGET, DRAFT = DEMO_DIRECTORY / "target", DEMO_DIRECTORY / "draft"
TEXTS = ("def read_lines(path):", "import os, sys\nimport")
NUM_TOKENS, DEPTH, Q_TOP_TOKENS = 12, 3, 1024


def config(directory):
    return EngineConfig(str(directory), kv_cache_tokens=2048)


@pytest.fixture(scope="module")
def plan():
    tokenizer = Tokenizer.from_directory(TARGET)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    return Plan(config(TARGET), config(DRAFT), prompts, (0.0, 1.0), NUM_TOKENS, DEPTH)


@pytest.fixture(scope="module")
def measured(plan):
    told = []
    found = survey(plan, told.append)
    assert len(told) == plan.num_steps
    return found


@pytest.fixture(scope="module")
def plainly(plan):
    """The texts that transformers writes, by temperature, with p and q at each position of the output."""
    target, draft = (AutoModelForCausalLM.from_pretrained(path).float().eval() for path in (TARGET, DRAFT))
    return {
        temperature: [_text(target, draft, prompt, temperature, seed) for seed, prompt in enumerate(plan.prompts)]
        for temperature in plan.temperatures
    }


@torch.no_grad()
def _text(target, draft, prompt, temperature, seed):
    tokens, laws = list(prompt), []
    for _ in range(NUM_TOKENS):
        gumbel = noise.gumbel(seed, len(tokens), 0, Purpose.SHARED, 4096) if temperature else 0.0
        logits = [
            model(torch.tensor([tokens])).logits[0, -1].double() / (temperature or 1.0) for model in (target, draft)
        ]
        log_p, log_q = (each.log_softmax(-1).numpy() for each in logits)
        tokens.append(int((log_p + gumbel).argmax()))
        laws.append((np.exp(log_p), np.exp(log_q), int((log_q + gumbel).argmax()) == tokens[-1]))
    return tokens[len(prompt) :], laws


def of(measured, name, temperature, verification):
    found = (source for source in measured.sources if (source.name, source.temperature) == (name, temperature))
    return next(source.agreement for source in found if source.verification is verification)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_acceptance_is_counted(measured, plainly, temperature):
    texts = [[is_same for _, _, is_same in laws] for _, laws in plainly[temperature]]
    found = of(measured, "draft", temperature, Verification.COUPLED)
    for depth in range(DEPTH):
        chains = [text[first : first + depth + 1] for text in texts for first in range(NUM_TOKENS - depth)]
        assert found.reached[depth] == sum(all(chain[:depth]) for chain in chains)
        assert found.accepted[depth] == sum(map(all, chains))


def test_rejection_is_expected_from_both_distributions(measured, plainly):
    accepted, reached_second, accepted_second = 0.0, 0.0, 0.0
    for output, laws in plainly[1.0]:
        chances, weights = [], []
        for token, (p, q, _) in zip(output, laws, strict=True):
            ordered = np.sort(q)[::-1]
            kept = ordered[:Q_TOP_TOKENS][ordered[:Q_TOP_TOKENS].cumsum() - ordered[:Q_TOP_TOKENS] < Q_MASS][-1]
            q = np.where(q >= kept, q, 0) / q[q >= kept].sum()
            chances.append(np.minimum(p, q).sum())
            weights.append(min(q[token] / p[token], 1.0))
        accepted += sum(chances)
        reached_second += sum(weights[:-1])
        accepted_second += sum(weight * chance for weight, chance in zip(weights, chances[1:], strict=False))
    found = of(measured, "draft", 1.0, Verification.REJECTION)
    assert found.accepted[0] == pytest.approx(accepted, rel=1e-4)
    assert found.reached[1] == pytest.approx(reached_second, rel=1e-4)
    assert found.accepted[1] == pytest.approx(accepted_second, rel=1e-4)


def test_every_source_is_measured_under_every_verification_that_differs(measured):
    found = {(source.name, source.temperature, source.verification.value) for source in measured.sources}
    assert {("draft", 0.0, "coupled"), ("draft", 1.0, "coupled"), ("draft", 1.0, "rejection")} <= found
    assert {("prompt_lookup", 0.0, "coupled"), ("prompt_lookup", 1.0, "rejection")} <= found
    assert not [each for each in found if each[1:] == (0.0, "rejection")], "it is the same as coupled"
    assert measured.num_tokens == {0.0: 2 * NUM_TOKENS, 1.0: 2 * NUM_TOKENS}


def test_memory_is_that_of_the_files(measured):
    """float32 here, bf16 in the files; 6 layers of 2 heads of 64 numbers, keys and values, in the target."""
    for role, path in (("target", TARGET), ("draft", DRAFT)):
        stored = (path / "model.safetensors").stat().st_size
        assert measured.memory[role].weights_bytes == pytest.approx(2 * stored, rel=0.01)
    shape = json.loads((TARGET / "config.json").read_text())
    numbers = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    assert measured.memory["target"].kv_bytes_a_token == 4 * numbers


def test_passes_take_time_and_no_less_for_more_rows(measured):
    times_s = [measured.timing.target(rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert times_s[0] > 0
    assert times_s == sorted(times_s)
    assert measured.timing.draft is not None


def test_the_command_prints_and_writes_what_simulate_takes(tmp_path, capsys):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text("\n".join(map(json.dumps, TEXTS)))
    pair = ("--target", str(TARGET), "--draft", str(DRAFT))
    how = ("--measure", "--prompts", str(prompts), "--tokens", "8", "--gamma", "2", "--timing", "8b+0.5b")
    assert main.main(["check", *pair, *how, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "servable: draft and target share their vocabulary" in out
    assert "this machine: target pass" in out
    assert "8b+0.5b: target pass 5 ms, of 8 rows 1.00x, draft pass 1 ms, c = 0.2" in out
    results = json.loads(file.read_text())
    assert all(set(each) == {"name", "value", "unit", "goal", "met", "settings"} for each in results)
    assert {each["settings"].get("hardware") for each in results} == {None, "this machine", "8b+0.5b"}
    for each in (each for each in results if each["name"] == "options of outrider simulate"):
        scenario = scenario_of(parsed(SimulateOptions, shlex.split(each["settings"]["options"])))
        alpha = next(
            other["value"]
            for other in results
            if other["name"] == "acceptance"
            and other["settings"] == {"source": "draft", "temperature": each["value"], "verification": "coupled"}
        )
        assert scenario.law.shares[0] == pytest.approx(alpha, abs=1e-4)
        passes_s = {each["settings"]["rows"]: each["value"] / 1e3 for each in results if _is_target_pass(each)}
        assert scenario.hardware.target.pass_s(1) == pytest.approx(passes_s[1], rel=1e-3)


def _is_target_pass(result):
    settings = result["settings"]
    return result["name"] == "a pass" and (settings["hardware"], settings["role"]) == ("this machine", "target")


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (("--measure",), "--prompts"),
        (("--prompts", "x.txt"), "--measure"),
        (("--measure", "--prompts", "x.txt", "--no-weights"), "--no-weights"),
        (("--json", "x.json"), "--json"),
        (("--measure", "--prompts", "/nowhere/x.txt"), "--prompts"),
        (("--temperatures", "0,-1"), "'--temperatures'"),
        (("--timing", "h100"), "'--timing'"),
        (("--tokens", "0"), "'--tokens'"),
        (("--gamma", "0"), "'--gamma'"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line_that_names_the_option(argv, option, capsys):
    assert main.main(["check", "--target", str(TARGET), *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, option in err, err.count("\n")) == ("", True, 1)


def test_a_prompt_that_is_too_long_is_named(plan):
    long = Plan(plan.target, None, [*plan.prompts, (1,) * 2040], (0.0,), NUM_TOKENS, DEPTH)
    with pytest.raises(ConfigError, match=r"^--prompts: prompt 3 has 2040 tokens; with --tokens 12 .* target"):
        survey(long, lambda _: None)


def test_a_draft_temperature_changes_what_a_draft_that_samples_is_worth(plan, measured):
    flat = survey(replace(plan, draft_temperature=50.0, depth=1), lambda _: None)
    assert of(flat, "draft", 0.0, Verification.COUPLED).alpha == of(measured, "draft", 0.0, Verification.COUPLED).alpha
    for verification in (Verification.COUPLED, Verification.REJECTION):
        assert of(flat, "draft", 1.0, verification).alpha < of(measured, "draft", 1.0, verification).alpha
