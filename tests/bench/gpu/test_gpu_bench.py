"""Timed functions do what they say, and ratios are those of the times: on a CPU, with small models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.__main__ import main
from bench.engine import devices
from bench.engine.pair import EnginePair
from bench.engine.peer import Peer
from bench.gpu import text as gpu
from bench.models.grow import cached
from bench.models.sizes import parse_size, read_shape, shape_of_size
from core.config import EngineConfig
from deploy.settings import DEMO_DIRECTORY
from workers.noise import gumbel
from workers.sampling import sampler

CPU, CARD = torch.device("cpu"), torch.device("cuda")
TARGET, DRAFT = DEMO_DIRECTORY / "target", DEMO_DIRECTORY / "draft"
TEXTS = (
    "import os\nimport sys\n\n\nclass Path:\n    def __init__(self, *parts):\n",
    "def read_lines(path):\n    with ",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module", autouse=True)
def small_memory():
    """A few reads of a gigabyte take seconds on a CPU, and so does noise by operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "MEMORY_BYTES", 1 << 16)
        patch.setattr(gpu, "NOISE_VOCAB", 101)
        yield


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def pair():
    return EnginePair.load(
        *(EngineConfig(str(model), kv_cache_tokens=512, share_prefixes=False) for model in (TARGET, DRAFT))
    )


# The whole


@pytest.mark.ci
def test_every_side_is_measured_and_writes_the_same_text(tmp_path):
    """In float32 plain decoding, transformers and speculation agree, whatever the machine's speed."""
    file = tmp_path / "results.json"
    options = {
        "only": "pair",
        "device": "cpu",
        "size": "8M",
        "dtype": "float32",
        "prompts": 2,
        "tokens": 8,
        "repeats": 2,
        "gamma": 3,
    }
    main(
        [
            "gpu",
            "--only=pair",
            *(f"--{name}={value}" for name, value in {**options, "cache": tmp_path, "json": file}.items()),
        ]
    )
    results = {result["name"]: result for result in json.loads(file.read_text())}
    judged = {name for name, result in results.items() if result["goal"] is not None}
    assert judged == {"a decoding step: time over the memory's roofline", "verifying 8 rows: time over decoding 1"}
    for way in ("transformers' generate", "speculative decoding"):
        same = results[f"{way}: equal to plain"]
        assert (same["value"], same["settings"]["prompts"], same["settings"]["gaps, nats"]) == (1.0, 2, [])
    assert 1 < results["speculative decoding: tokens a round"]["value"] <= 4
    for result in results.values():
        assert result["settings"]["card"] == devices.device_name(CPU)
        assert (result["settings"]["dtype"], result["settings"]["parameters"]) == ("float32", "8M")
    timed = [result for result in results.values() if result["unit"] in ("x", "ms")]
    assert len(timed) == 11
    for result in timed:
        assert result["settings"]["min"] <= result["value"] <= result["settings"]["max"]


# What is compared


@pytest.mark.ci
def test_all_ways_write_the_same_text_and_guesses_save_rounds(pair, prompts):
    for prompt in prompts:
        plain = pair.plain(prompt, NUM_TOKENS)
        assert plain.num_rounds == NUM_TOKENS - 1
        speculative = pair.speculative(prompt, NUM_TOKENS, 5)
        assert speculative.tokens == plain.tokens
        assert speculative.num_rounds <= NUM_TOKENS / 2
        rejected = pair.rejected(prompt, NUM_TOKENS, 7)
        assert rejected.tokens == plain.tokens
        assert rejected.num_rounds >= NUM_TOKENS - 3, "each of them verifies guesses for one token or hardly more"
    for engine in (pair.target, pair.draft):
        engine.check_integrity()
        assert engine.stats().num_sessions == 0


def test_rejected_guesses_are_as_many_rows_as_they_say(pair, prompts):
    before = pair.target.stats().num_rows
    completion = pair.rejected(prompts[0], 4, 7)
    assert pair.target.stats().num_rows - before == len(prompts[0]) + 8 * completion.num_rounds


def test_no_guess_is_made_for_what_is_not_wanted(pair, prompts):
    before = pair.draft.stats().num_rows
    assert pair.speculative(prompts[0], 1, 5) == pair.plain(prompts[0], 1)
    assert pair.speculative(prompts[0], 2, 5) == pair.plain(prompts[0], 2)
    assert pair.draft.stats().num_rows == before


def test_no_two_sampled_texts_have_the_same_noise(pair, prompts, monkeypatch):
    asked, draw = [], sampler.largest_with_gumbel
    monkeypatch.setattr(sampler, "largest_with_gumbel", lambda of, keys: asked.extend(keys) or draw(of, keys))
    texts = {pair.sampled(prompts[1], NUM_TOKENS).tokens for _ in range(2)}
    assert len(texts) == 2
    assert len(set(asked)) == len(asked) == 2 * NUM_TOKENS


def test_the_draft_alone_writes_what_transformers_makes_it_write(pair, prompts):
    draft = Peer(DRAFT, "float32", CPU)
    for prompt in prompts:
        assert pair.drafted(prompt, NUM_TOKENS) == draft.complete(prompt, NUM_TOKENS)


def test_an_assistant_changes_no_token(prompts):
    peer, assistant = Peer(TARGET, "float32", CPU), Peer(DRAFT, "float32", CPU)
    alone = peer.complete(prompts[0], NUM_TOKENS)
    assert peer.complete(prompts[0], NUM_TOKENS, assistant) == alone
    assert len(alone) == NUM_TOKENS


# How near two tokens were


def test_a_text_that_differs_is_counted_and_the_gap_is_that_of_the_two_tokens(pair, prompts, capsys):
    plain = [pair.plain(prompt, 8).tokens for prompt in prompts]
    context = [*prompts[1], *plain[1][:5]]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    with torch.inference_mode():
        best = model(torch.tensor([context])).logits[0, -1].topk(2)
    assert int(best.indices[0]) == plain[1][5]
    other = (*plain[1][:5], int(best.indices[1]), *plain[1][6:])
    share = gpu.equality("another", pair.target, prompts, plain, [plain[0], other])
    gap = float(best.values[0] - best.values[1])
    assert share.value == 0.5
    assert share.settings["gaps, nats"] == [pytest.approx(gap, abs=1e-3)]
    assert "prompt 1 differs from token 5 on" in capsys.readouterr().out


# Ratios


def times(**changed: list[float]) -> dict[str, list[float]]:
    by_side = {
        gpu.MEMORY: [0.5e-12, 1e-12, 2e-12],
        gpu.PLAIN: [2e-3, 5e-3, 12e-3],
        gpu.SAMPLED: [3e-3, 6e-3, 12e-3],
        gpu.VERIFYING: [2.2e-3, 5.5e-3, 13.2e-3],
        gpu.SPECULATIVE: [1e-3, 2e-3, 3e-3],
        gpu.GENERATE: [8e-3, 10e-3, 12e-3],
        gpu.ASSISTED: [4e-3, 4e-3, 4e-3],
        gpu.DRAFT: [1e-3, 1e-3, 1e-3],
        gpu.GENERATE_DRAFT: [2e-3, 2e-3, 2e-3],
    }
    return by_side | changed


def test_ratios_are_taken_repeat_by_repeat():
    """At 4 GB of weights the roofline is 2, 4 and 8 ms."""
    results = {result.name: result for result in gpu.ratios(times(), 4_000_000_000)}
    step = results["a decoding step: time over the memory's roofline"]
    assert (step.value, step.goal, step.met) == (1.25, 1.25, True)
    assert (step.settings["min"], step.settings["max"]) == (1.0, 1.5)
    assert (step.settings["plain, ms"], step.settings["GB/s"]) == (5.0, 1000.0)
    rows = results["verifying 8 rows: time over decoding 1"]
    assert (rows.value, rows.goal, rows.met) == (1.1, 1.1, True)
    values = {name: result.value for name, result in results.items()}
    assert values["a decoding step at T=1: time over a greedy one"] == 1.2
    assert values["plain decoding: speed over transformers' generate"] == 2.0
    assert values["speculative decoding: speed over plain"] == 2.5
    assert values["speculative decoding: speed over transformers' assisted generation"] == 2.0
    assert values["transformers' assisted generation: speed over its generate"] == 2.5
    assert values["a draft step"] == 1.0
    assert values["a draft step: time over a target step (c)"] == 0.2
    assert values["a draft step: speed over transformers' generate"] == 2.0
    assert results["speculative decoding: speed over plain"].settings["speculative, tokens/s"] == 500.0


def test_goals_are_missed_from_above():
    step, rows, *_ = gpu.ratios(times(plain=[5.2e-3] * 3, verifying=[6e-3] * 3), 4_000_000_000)
    assert (step.met, rows.met) == (False, False)


def test_a_step_reads_all_weights_but_the_embedding(tmp_path):
    shape = shape_of_size(read_shape(TARGET), parse_size("8M"))
    files: list[Path] = [*cached(TARGET, shape, "bfloat16", tmp_path).glob("*.safetensors")]
    sizes = {name: tensor.nbytes for file in files for name, tensor in load_file(file).items()}
    embedding = sizes.pop("model.embed_tokens.weight")
    assert embedding > 0
    assert gpu.bytes_read(shape, "bfloat16") == sum(sizes.values())
    assert gpu.bytes_read(shape, "float32") == 2 * sum(sizes.values())


@pytest.mark.parametrize("ways", [("operators",), ("operators", "one kernel")], ids=len)
def test_noise_is_timed_by_each_way_there_is_and_the_first_time_does_not_count(ways, monkeypatch):
    fakes = {name: [] for name in ("operators", "one kernel")}
    monkeypatch.setattr(gumbel, "_gumbel_in_parts", lambda *given: fakes["operators"].append(given))
    kernel = (lambda *given: fakes["one kernel"].append(given)) if len(ways) > 1 else None
    monkeypatch.setattr(gpu, "find_noise_kernel", lambda _: kernel)
    results = gpu.noise_times(CPU, 3)
    found = [(result.name, result.settings["num_runs"]) for result in results]
    assert found == [(f"noise of 16 rows, by {name}", 3) for name in ways]
    for name in ways:
        assert [(keys.shape, vocab_size) for keys, vocab_size in fakes[name]] == [((16, 4), gpu.NOISE_VOCAB)] * 4


# Turns and devices


def test_sides_take_turns_on_each_prompt_and_the_first_turn_does_not_count():
    calls: list[tuple[str, int, int]] = []
    sides = {
        name: lambda prompt, num_tokens, name=name: calls.append((name, prompt[0], num_tokens)) for name in ("a", "b")
    }
    found = gpu.take_turns(sides, CPU, [[7], [8]], num_tokens=4, num_repeats=2)
    assert {name: len(values) for name, values in found.items()} == {gpu.MEMORY: 2, "a": 2, "b": 2}
    turn = [("a", 1), ("a", 5), ("b", 1), ("b", 5)]
    assert calls == [(name, prompt, count) for prompt in (7, 8, 7) for name, count in turn]
    assert all(value > 0 for value in found[gpu.MEMORY])


def test_waits_are_what_torch_warns_of(monkeypatch):
    """For each token after the first; other warnings are none."""
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def complete(num_tokens):
        assert modes[-1] == "warn"
        warnings.warn("something else", stacklevel=1)
        for _ in range(3 + 2 * num_tokens):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert devices.waits_per_token(CARD, complete, 8) == 2
    assert modes == ["warn", "default"] * 2


def test_a_device_is_waited_for_before_and_after_what_is_timed(monkeypatch):
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    assert devices.timed(CARD, lambda: seen.append("work")) > 0
    assert seen == [CARD, "work", CARD]
    seen.clear()
    devices.timed(CPU, lambda: seen.append("work"))
    assert seen == ["work"]


def test_a_card_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the card at {device}")
    assert devices.device_name(CARD) == "the card at cuda"


def test_a_device_that_is_not_there_is_refused_in_one_line_before_anything_is_grown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu", "--cache", str(tmp_path)]) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert "no device cuda" in error
    assert not list(tmp_path.iterdir())
    assert devices.open_device("cpu") == CPU
