"""Compiled code computes what the model does, is made at start or before it, and is done without where it cannot be."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.config import EngineConfig
from core.speculation.token_tree import TokenTree
from tests import checkpoints
from tests.workers.runtime.test_runtime import assert_same, eager_logits, in_all_ways, tokens
from tests.workers.runtime.test_runtime_families import NUM_TOKENS, PROMPT_TOKENS, generated, guesses, verified_round
from workers.engine.target import TargetEngine
from workers.runtime import backends
from workers.runtime.backend import Backend, BackendUnavailable, model_logits
from workers.runtime.backend_stack import choose
from workers.runtime.backends import CompiledBackend, native_library, packed_weights
from workers.runtime.backends.packed_cpu import PackedBackend
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import Step, StepRows

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # compilers take minutes on a busy machine

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler here"
)


needs_kernels = pytest.mark.skipif(
    not packed_weights.is_available(torch.bfloat16, torch.device("cpu")), reason="this CPU has no packed products"
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else there may be for these settings."""
    monkeypatch.setattr(backends, "BACKENDS", (CompiledBackend, PackedBackend))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled code, kept from one test to the next."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.write("llama", tmp_path / "model")


def warm(path: Path, folder: Path, **settings: Any) -> ModelRuntime:
    runtime = checkpoints.runtime(path, compile=True, compile_cache=str(folder), **settings)
    runtime.warm_up(lambda _: None)
    return runtime


@pytest.fixture
def runtime(checkpoint: Path, folder: Path) -> ModelRuntime:
    """One that runs compiled code; deterministic, for the sake of the test that compares bits."""
    return warm(checkpoint, folder, deterministic=True)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("g++ is not here\nand this is line two")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", refuse)


@needs_compiler
@pytest.mark.ci
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
@pytest.mark.ci
def test_compiled_code_decodes_what_generate_decodes(runtime: ModelRuntime) -> None:
    _decode("llama", runtime)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_so_it_is_in_every_family_with_small_layers_left_as_they_are(family: str, tmp_path: Path) -> None:
    _decode(family, warm(checkpoints.write(family, tmp_path / "model"), tmp_path / "compiled"))


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
@pytest.mark.ci
def test_bits_of_compiled_rows_are_their_own(runtime: ModelRuntime) -> None:
    rng = random.Random(2)
    seqs, nexts = [tokens(rng, rng.randint(1, 60)) for _ in range(16)], [tokens(rng, 8) for _ in range(16)]
    first, *others = in_all_ways(runtime, seqs, nexts)
    assert all(torch.equal(first, other) for other in others)
    assert runtime.num_eager_steps == 0


@needs_compiler
@needs_kernels
@pytest.mark.ci
def test_so_are_bfloat16s_where_they_are_widened(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles of one row: compiled code rounds where the model does, whatever it has made one kernel of."""
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: False)
    runtime = warm(checkpoint, tmp_path / "compiled", dtype="bfloat16", deterministic=True)
    assert runtime.context.tiling.min_rows == 1
    test_bits_of_compiled_rows_are_their_own(runtime)


@needs_compiler
@pytest.mark.ci
@pytest.mark.usefixtures("runtime", "no_compiler")
def test_a_second_start_compiles_nothing(checkpoint: Path, folder: Path) -> None:
    lines: list[str] = []
    old = folder / f"{1:032x}-one-row.pt2"
    old.touch()
    os.utime(old, (0, 0))
    again = checkpoints.runtime(checkpoint, compile=True, compile_cache=str(folder), deterministic=True)
    again.warm_up(lines.append)
    assert lines == [f"compiled before, in {folder}"]
    assert not old.exists()
    assert again.num_eager_steps == 0


@needs_compiler
@pytest.mark.ci
@pytest.mark.usefixtures("runtime", "no_compiler")
def test_code_that_was_compiled_for_other_weights_computes_with_these(folder: Path, tmp_path: Path) -> None:
    other = warm(checkpoints.write("llama", tmp_path / "other", seed=1), folder, deterministic=True)
    prompt = tokens(random.Random(3), 9)
    got = other.forward([StepRows(other.cache.new_sequence(), prompt)])
    assert_same(got[-1], eager_logits(checkpoints.build("llama", seed=1), prompt)[-1])
    assert other.num_eager_steps == 0


@pytest.mark.parametrize(
    ("settings", "has_bfloat16", "want"),
    [
        ({}, True, ["one-row", "more-rows"]),
        ({"dtype": "bfloat16"}, True, ["more-rows"]),  # whose steps have four rows at least
        ({"dtype": "bfloat16"}, False, ["one-row", "more-rows"]),
        # One will do, if bits are equal.
        ({"dtype": "bfloat16", "deterministic": True}, True, ["one-row", "more-rows"]),
    ],
    ids=["float32", "bfloat16", "bfloat16 without instructions", "deterministic"],
)
def test_each_size_of_step_has_code_that_is_made_for_it(
    settings: dict[str, Any],
    has_bfloat16: bool,
    want: list[str],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    monkeypatch.setattr(packed_weights, "has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(packed_weights, "is_available", lambda *_: False)
    monkeypatch.setattr(
        native_library, "_compile", lambda _module, _rows, file: made.append(file.stem.partition("-")[2])
    )
    warm(checkpoint, tmp_path / "compiled", **settings)
    assert made == want


@needs_compiler
def test_what_is_damaged_on_disk_is_made_again(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    made: list[Path] = []

    def pretend(module: Any, num_rows: int, file: Path) -> None:
        made.append(file)

    monkeypatch.setattr(native_library, "_compile", pretend)
    model = checkpoints.runtime(checkpoint, deterministic=True).context.model
    for rows in ("one-row", "more-rows"):
        (tmp_path / f"{native_library._name_of(model)}-{rows}.pt2").write_text("half of it")
    with pytest.raises(BackendUnavailable, match="one-row"):
        native_library.build(model, {}, tmp_path, 1, lambda _: None)
    assert [file.name.partition("-")[2] for file in made] == ["one-row.pt2", "more-rows.pt2"]


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_so_counts_and_serves(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(str(checkpoint), kv_cache_tokens=1024, compile=True, compile_cache=str(tmp_path / "none yet"))
    with caplog.at_level(logging.WARNING, logger="workers"):
        engine = TargetEngine.load(config, 1, lambda _: None)
        engine.warm_up(lambda _: None)
    assert [record.getMessage() for record in caplog.records] == [
        "model does not run compiled, so that every step takes longer: g++ is not here"
    ]
    kv = engine._runtime.cache.new_sequence()
    engine._runtime.forward([StepRows(kv, [1, 2, 3])])
    assert engine.stats().num_eager_steps == 1


@pytest.mark.parametrize(
    "problem", ["everybody can write", "its group can write", "cannot be written", "another user's"]
)
def test_code_is_kept_and_run_only_where_nobody_else_can_put_any(
    problem: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    if problem == "cannot be written":
        folder.write_text("a file")
    else:
        folder.mkdir()
    if problem == "everybody can write":
        folder.chmod(0o777)
    if problem == "its group can write":
        folder.chmod(0o770)
    if problem == "another user's":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 1234, -1)
    with pytest.raises(BackendUnavailable, match=problem):
        native_library.build(checkpoints.runtime(checkpoint).context.model, {}, folder, 1, lambda _: None)


def test_who_did_not_ask_for_it_gets_none_and_counts_none(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "build", None)
    runtime = checkpoints.runtime(checkpoint)
    runtime.warm_up(lambda _: None)
    runtime.forward([StepRows(runtime.cache.new_sequence(), [1])])
    assert runtime.num_eager_steps == 0


def test_ranks_of_a_shared_model_do_without() -> None:
    """Following the model's code would wait for the other ranks, who follow nothing."""
    config = EngineConfig("m", compile=True, tensor_parallel=2)
    assert choose(config) == [PackedBackend]


def test_where_no_compiled_backend_is_for_the_settings_it_says_so_counts_and_serves(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (PackedBackend,))
    runtime = checkpoints.runtime(checkpoint, compile=True)
    with caplog.at_level(logging.WARNING, logger="workers"):
        runtime.warm_up(lambda _: None)
    assert (
        "does not run compiled, so that every step takes longer: no compiled backend suits 1 rank(s) on cpu"
        in caplog.text
    )
    runtime.forward([StepRows(runtime.cache.new_sequence(), [1])])
    assert runtime.num_eager_steps == 1


def mistaken(factor: float) -> type[Backend]:
    """The model itself, with a mistake: every logit is a hundredth too large, or every lone row stands at 0."""

    class Mistaken(Backend):
        @classmethod
        def supports(cls, config: EngineConfig) -> bool:
            return config.compile

        def run(self, step: Step) -> torch.Tensor:
            ids, positions, wanted = step.tensors(self.context.cache.device)
            plan = self.context.gathering(step.spans, len(step.ids))
            positions = positions * 0 if factor == 1 and len(ids) == 1 else positions
            return model_logits(self.context.model, ids, positions, wanted, plan) * factor

    return Mistaken


@pytest.mark.parametrize("factor", [1.01, 1])
def test_compiled_code_that_computes_something_else_is_not_used(
    factor: float, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (mistaken(factor), PackedBackend))
    with caplog.at_level(logging.WARNING, logger="workers"):
        runtime = warm(checkpoint, folder)
    assert "the compiled model's logits are off by" in caplog.text
    assert not runtime.backends.is_compiled


class FakeModel(nn.Module):
    """Weights so small that a compiler would rather have them in its code, and a sum of a product, which it would
    rather not round in between; and more rows than it is meant for."""

    def __init__(self, scale: float, *, has_limit: bool = False) -> None:
        super().__init__()
        scales, shifts = torch.tensor(scale), torch.full((1, 3), scale / 3)
        self.scale, self.shift = nn.Parameter(scales.bfloat16()), nn.Parameter(shifts.bfloat16())
        self.has_limit = has_limit

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        rows = (ids + positions)[:, None].bfloat16() * torch.exp(self.scale) + self.shift
        return -rows[wanted] if self.has_limit and wanted.shape[0] > 100 else rows[wanted]


@needs_compiler
def test_weights_are_no_part_of_the_code_however_small_they_are_and_bfloat16_is_rounded_where_the_model_rounds(
    tmp_path: Path,
) -> None:
    file = tmp_path / "more.pt2"
    native_library._compile(FakeModel(1.0), 8, file)
    step = [torch.arange(3, 67), torch.arange(64), torch.arange(63)]
    for scale in (1.0, 2.0):
        model = FakeModel(scale)
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        (got,) = native_library._load(file, weights)(list(step))
        assert torch.equal(got, model(*step).detach())


def test_code_that_is_another_for_many_rows_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="wrong above 100 rows"):
        native_library._compile(FakeModel(1.0, has_limit=True), 8, tmp_path / "more.pt2")


def test_what_was_compiled_is_named_after_all_that_shaped_it(checkpoint: Path, tmp_path: Path) -> None:
    def name(path: Path, **settings: Any) -> str:
        return native_library._name_of(checkpoints.runtime(path, **settings).context.model)

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


def test_what_no_start_has_used_for_long_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else that lies there; what cannot be touched, or deleted, is left."""
    names = (f"{1:032x}-one-row.pt2", f"{2:032x}-more-rows.pt2", f"{3:032x}-one-row.pt2", "program.pt2")
    used, old, young, foreign = files = [tmp_path / name for name in names]
    long_ago = time.time() - native_library.UNUSED_S - 60
    for file in files:
        file.touch()
    for file in (used, old, foreign):
        os.utime(file, (long_ago, long_ago))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refuse)
        patch.setattr(Path, "unlink", refuse)
        native_library._tidy(tmp_path, [used])
    assert set(tmp_path.iterdir()) == set(files)
    native_library._tidy(tmp_path, [used])
    assert set(tmp_path.iterdir()) == {used, young, foreign}
    assert used.stat().st_mtime > time.time() - 3600
