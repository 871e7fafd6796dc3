"""Compiled code computes what the model does, is made at start or before it, and is done without where it cannot be."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.trees import TokenTree
from tests import checkpoints
from tests.workers.test_runtime import assert_same, eager_logits, in_all_ways, tokens
from tests.workers.test_runtime_families import NUM_TOKENS, PROMPT_TOKENS, generated, guesses, verified_round
from workers import compiled
from workers.compiled import CannotCompile
from workers.runtime import ModelRuntime
from workers.steps import StepRows
from workers.target import TargetEngine

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler here"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was compiled, kept from one test to the next."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def _caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "default_folder", lambda: folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.write("llama", tmp_path / "model")


def warm(path: Path, **settings: Any) -> ModelRuntime:
    runtime = checkpoints.runtime(path, compile=True, **settings)
    runtime.warm_up(lambda _: None)
    return runtime


@pytest.fixture
def runtime(checkpoint: Path) -> ModelRuntime:
    """One that runs compiled code; deterministic, for the sake of the test that compares bits."""
    return warm(checkpoint, deterministic=True)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("g++ is not here\nand this is line two")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)
    return


@needs_compiler
def test_one_row_many_rows_and_trees_are_the_models_own(runtime: ModelRuntime) -> None:
    """Alone and in company; with prompts in chunks, and rows that want no logits."""
    rng = random.Random(1)
    seqs, nexts = [tokens(rng, rng.randint(1, 60)) for _ in range(6)], [tokens(rng, 8) for _ in range(6)]
    eager = checkpoints.build("llama")
    want = torch.stack([eager_logits(eager, [*ids, *some])[-8:] for ids, some in zip(seqs, nexts, strict=True)])
    for got in in_all_ways(runtime, seqs, nexts):
        assert_same(got, want)
    kv, prompt = runtime.cache.new_sequence(), tokens(rng, 40)
    for first, last in ((0, 1), (1, 3), (3, 33)):
        assert not len(runtime.forward([StepRows(kv, prompt[first:last], wants_logits=False)]))
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 0, 1))
    got = runtime.forward([StepRows(kv, prompt[33:], tree)])
    for row, branch in enumerate(([], [5], [6], [5, 7], [6, 8])):
        assert_same(got[row], eager_logits(eager, [*prompt, *branch])[-1])
    assert runtime.num_eager_steps == 0


@needs_compiler
def test_compiled_code_decodes_what_generate_decodes(runtime: ModelRuntime) -> None:
    _decode("llama", runtime)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_so_it_is_in_every_family_with_small_layers_left_as_they_are(family: str, tmp_path: Path) -> None:
    _decode(family, warm(checkpoints.write(family, tmp_path)))


def _decode(family: str, runtime: ModelRuntime) -> None:
    rng = random.Random(family)
    prompt = tokens(rng, PROMPT_TOKENS)
    want = generated(family, prompt)
    kv = runtime.cache.new_sequence()
    got = verified_round(runtime, kv, prompt, guesses(rng, want))
    while len(got) < NUM_TOKENS:
        got += verified_round(runtime, kv, got[-1:], guesses(rng, want[len(got) :]))
    assert got[:NUM_TOKENS] == want
    assert runtime.num_eager_steps == 0, "steps were compiled"


@needs_compiler
def test_bits_of_compiled_rows_are_their_own(runtime: ModelRuntime) -> None:
    rng = random.Random(2)
    seqs, nexts = [tokens(rng, rng.randint(1, 60)) for _ in range(16)], [tokens(rng, 8) for _ in range(16)]
    first, *others = in_all_ways(runtime, seqs, nexts)
    assert all(torch.equal(first, other) for other in others)
    assert runtime.num_eager_steps == 0


@needs_compiler
@pytest.mark.usefixtures("runtime", "no_compiler")
def test_a_second_start_compiles_nothing(checkpoint: Path, folder: Path) -> None:
    lines: list[str] = []
    again = checkpoints.runtime(checkpoint, compile=True, deterministic=True)
    again.warm_up(lines.append)
    assert lines == [f"compiled before, in {folder}"]
    assert again.num_eager_steps == 0


@needs_compiler
def test_what_is_damaged_on_disk_is_made_again(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled, "default_folder", lambda: tmp_path)
    made: list[Path] = []

    def pretend(module: Any, num_rows: int, file: Path) -> None:
        made.append(file)

    monkeypatch.setattr(compiled, "_compile", pretend)
    model = checkpoints.runtime(checkpoint, deterministic=True)._model
    for rows in ("one-row", "more-rows"):
        (tmp_path / f"{compiled._name_of(model)}-{rows}.pt2").write_text("half of it")
    with pytest.raises(CannotCompile, match="one-row"):
        compiled.build(model, tmp_path, lambda _: None)
    assert [file.name[-12:] for file in made] == ["-one-row.pt2", "more-rows.pt2"[-12:]]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_so_counts_and_serves(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "default_folder", lambda: tmp_path / "none yet")
    with caplog.at_level(logging.WARNING, logger="workers"):
        engine = TargetEngine.load(EngineConfig(str(checkpoint), kv_cache_tokens=1024, compile=True), 1, lambda _: None)
        engine.warm_up(lambda _: None)
    assert [record.getMessage() for record in caplog.records] == [
        "model does not run compiled, so that every step takes longer: RuntimeError: g++ is not here"
    ]
    kv = engine._runtime.cache.new_sequence()
    engine._runtime.forward([StepRows(kv, [1, 2, 3])])
    assert engine.stats().num_eager_steps == 1


def test_who_did_not_ask_for_it_gets_none_and_counts_none(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "build", None)
    runtime = checkpoints.runtime(checkpoint)
    runtime.warm_up(lambda _: None)
    runtime.forward([StepRows(runtime.cache.new_sequence(), [1])])
    assert runtime.num_eager_steps == 0


def test_ranks_of_a_shared_model_do_without(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following the model's code would wait for the other ranks, who follow nothing."""
    monkeypatch.setattr(compiled, "build", None)
    runtime = checkpoints.runtime(checkpoint, compile=True)
    runtime._is_shared = True
    runtime.warm_up(lambda _: None)
    runtime.forward([StepRows(runtime.cache.new_sequence(), [1])])
    assert runtime.num_eager_steps == 1


class FakeCompiled:
    """The model itself, with a mistake: every logit is a hundredth too large."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, plan: Any) -> torch.Tensor:
        output = self.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted, plan=plan
        )
        logits: torch.Tensor = output.logits[0] * 1.01
        return logits


def test_compiled_code_that_computes_something_else_is_not_used(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "build", lambda model, *_: FakeCompiled(model))
    with caplog.at_level(logging.WARNING, logger="workers"):
        runtime = warm(checkpoint)
    assert "are off by 0.01 of their norm" in caplog.text
    assert runtime._compiled is None


def test_what_was_compiled_is_named_after_all_that_shaped_it(checkpoint: Path, tmp_path: Path) -> None:
    def name(path: Path, **settings: Any) -> str:
        return compiled._name_of(checkpoints.runtime(path, **settings)._model)

    usual = name(checkpoint)
    assert name(checkpoints.write("llama", tmp_path / "a", seed=1)) == usual, "weights are no part of it"
    others = [
        name(checkpoints.write("llama", tmp_path / "b", rms_norm_eps=1e-3)),
        name(checkpoints.write("mistral", tmp_path / "c")),
        name(checkpoint, dtype="bfloat16"),
        name(checkpoint, deterministic=True),  # packs small layers, too
    ]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    others.append(name(checkpoint))
    torch.set_num_threads(num_threads)
    assert len({usual, *others}) == 6
