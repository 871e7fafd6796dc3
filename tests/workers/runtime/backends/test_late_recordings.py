"""Shapes of steps that are recorded after the start: which and when, and that no result depends on it.

A recording is here a function that is called again on the same tensors, as in `test_cuda_graph`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.speculation.token_tree import ROOT
from tests import checkpoints
from tests.workers.runtime.backends.test_cuda_graph import again, backend_of, cold, warm
from tests.workers.runtime.test_runtime import assert_same, eager_logits, held, path_tokens, random_tree, tokens
from workers.runtime.backends import cuda_graph
from workers.runtime.runtime import ModelRuntime
from workers.step.paged_plan import TILE_ROWS
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

SIZES = {"max_step_tokens": 48, "kv_cache_tokens": 2048}
FIRST = [(48, 16), (32, 16), (16, 16), (8, 16), (4, 16), (4, 1), (2, 16), (1, 1)]
"""Shapes that are recorded at start, in their order: (rows, rows of a tile)."""
LATER = [(2, 1), (8, 1), (16, 1), (24, 16), (24, 1), (32, 1), (40, 16), (40, 1), (48, 1)]


class Recorder:
    """Notes the shapes that it records; raises for some."""

    def __init__(self, failing: tuple[tuple[int, int], ...] = ()) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.replayed: list[tuple[int, int]] = []
        self._failing = failing

    def __call__(self, work: Any) -> Callable[[], None]:
        (shape,) = work.args
        kind = shape.num_rows, shape.tile_rows
        self.shapes.append(kind)
        replay = again(work)
        if kind in self._failing:
            raise RuntimeError("out of memory\nand more")

        def noted() -> None:
            self.replayed.append(kind)
            replay()

        return noted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def runtime(recorder: Recorder, checkpoint: Path) -> ModelRuntime:
    runtime = warm(checkpoint, recorder, **SIZES)
    recorder.replayed.clear()
    backend_of(runtime)._num_needed = dict.fromkeys(backend_of(runtime)._num_needed, 0)  # without the self-tests'
    return runtime


def finish(runtime: ModelRuntime) -> int:
    """Record what an idle engine records; returns the number of shapes."""
    count = 0
    while runtime.build_more(is_idle=True):
        count += 1
    return count


def rows_of(runtime: ModelRuntime, num_sequences: int, num_rows: int = 1) -> list[StepRows]:
    """A step of new sequences, with as many rows each."""
    return [StepRows(runtime.cache.new_sequence(), [1] * num_rows) for _ in range(num_sequences)]


def step(runtime: ModelRuntime, num_sequences: int, num_rows: int = 1) -> None:
    batch = rows_of(runtime, num_sequences, num_rows)
    runtime.forward(batch)
    for item in batch:
        runtime.cache.free(item.kv)


def test_at_start_the_largest_and_what_is_timed_or_tested_is_recorded(
    runtime: ModelRuntime, recorder: Recorder
) -> None:
    assert recorder.shapes == FIRST


def test_a_service_starts_with_a_tenth_of_its_shapes(checkpoint: Path) -> None:
    runtime = cold(checkpoint, kv_cache_tokens=1024, max_step_tokens=2048)
    backend = cuda_graph.CudaGraphBackend(runtime.context)
    first = [shape for shape in backend._shapes if backend._is_first(shape)]
    assert (len(first), len(backend._shapes)) == (11, 101)
    assert first[0] == backend._shapes[0]


def test_each_shape_is_recorded_once_and_small_ones_first(runtime: ModelRuntime, recorder: Recorder) -> None:
    assert finish(runtime) == len(LATER)
    later = recorder.shapes[len(FIRST) :]
    assert sorted(later) == sorted(LATER)
    assert [num_rows for num_rows, _ in later] == sorted(num_rows for num_rows, _ in LATER)
    assert not runtime.build_more(is_idle=True)
    assert len(recorder.shapes) == len(FIRST) + len(LATER)


@pytest.mark.parametrize(
    ("num_sequences", "num_rows", "before", "after"),
    [
        (1, 1, (1, 1), (1, 1)),
        (1, 17, (32, 16), (24, 16)),
        (1, 33, (48, 16), (40, 16)),
        (2, 1, (2, 16), (2, 1)),
        (3, 1, (4, 1), (4, 1)),
        (20, 1, (32, 16), (24, 1)),
        (3, 3, (16, 16), (16, 16)),
    ],
)
def test_until_then_a_step_takes_the_smallest_with_room(
    runtime: ModelRuntime, recorder: Recorder, num_sequences: int, num_rows: int,
    before: tuple[int, int], after: tuple[int, int],
) -> None:  # fmt: skip
    step(runtime, num_sequences, num_rows)
    finish(runtime)
    step(runtime, num_sequences, num_rows)
    assert recorder.replayed == [before, after]
    assert runtime.num_eager_steps == 0


def logits_of_steps(runtime: ModelRuntime) -> torch.Tensor:
    """Logits of a prompt, of single rows of several sequences, of a chain and of a tree, most in shapes of the rest."""
    rng = random.Random(11)
    kvs = [held(runtime, tokens(rng, size)) for size in (19, 5, 21, 7, 9)]
    steps = [
        [StepRows(kv, [3]) for kv in kvs],
        [StepRows(kv, [4]) for kv in kvs[:2]],
        [StepRows(kvs[0], [5], random_tree(rng, 18))],
        [StepRows(kvs[1], tokens(rng, 35))],
    ]
    found = torch.cat([runtime.forward(each) for each in steps])
    for kv in kvs:
        runtime.cache.free(kv)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_computed_does_not_depend_on_it(deterministic: bool, checkpoint: Path) -> None:
    runtime = warm(checkpoint, **SIZES, deterministic=deterministic)
    assert runtime.backends.is_compiled
    before = logits_of_steps(runtime)
    assert finish(runtime) > 0
    after = logits_of_steps(runtime)
    assert_same(after, before)
    if deterministic:
        assert torch.equal(after, before)


def test_a_step_of_a_late_shape_equals_the_models_own_code(runtime: ModelRuntime, recorder: Recorder) -> None:
    finish(runtime)
    rng = random.Random(12)
    prefix, tree = tokens(rng, 20), random_tree(rng, 20)
    kv, eager = held(runtime, prefix[:-1]), checkpoints.build("llama")
    got = runtime.forward([StepRows(kv, prefix[-1:], tree)])
    assert recorder.replayed[-1] == (24, TILE_ROWS)
    want = [eager_logits(eager, prefix + path_tokens(tree, node))[-1] for node in range(ROOT, len(tree))]
    assert_same(got, torch.stack(want))


def test_a_busy_engine_records_what_many_steps_have_needed(
    runtime: ModelRuntime, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph, "RECORD_AFTER", 3)
    for _ in range(2):
        step(runtime, 20)
        step(runtime, 1, 17)
        step(runtime, 4)  # recorded at start
    assert not runtime.build_more(is_idle=False)
    step(runtime, 20)
    assert runtime.build_more(is_idle=False)
    assert recorder.shapes[len(FIRST) :] == [(24, 1)]
    assert not runtime.build_more(is_idle=False)


def test_an_idle_engine_begins_with_what_steps_have_needed(runtime: ModelRuntime, recorder: Recorder) -> None:
    step(runtime, 1, 33)
    assert runtime.build_more(is_idle=True)
    assert recorder.shapes[len(FIRST) :] == [(40, 16)]


def test_what_cannot_be_recorded_later_is_said_once_and_costs_nothing_else(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(failing=((24, 16),))
    runtime = warm(checkpoint, recorder, **SIZES)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        finish(runtime)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("steps of 24 rows are not recorded, and computed with more: out of memory")
    assert sorted(recorder.shapes) == sorted(FIRST + LATER)
    recorder.replayed.clear()
    step(runtime, 1, 17)
    step(runtime, 1, 33)
    assert recorder.replayed == [(32, 16), (40, 16)]
    assert (runtime.num_eager_steps, runtime.build_more(is_idle=True)) == (0, False)


def test_a_step_that_no_recording_has_room_for_is_run_and_its_shape_is_due(tmp_path: Path) -> None:
    """Trees of a model with a short window are not recorded, so no other shape has room for five single rows."""
    recorder = Recorder()
    runtime = warm(checkpoints.write("mistral", tmp_path), recorder, **SIZES)
    assert set(recorder.shapes) == set(FIRST)
    backend_of(runtime)._num_needed = dict.fromkeys(backend_of(runtime)._num_needed, 0)
    step(runtime, 5)
    assert runtime.num_eager_steps == 1
    assert runtime.build_more(is_idle=False)
    step(runtime, 5)
    assert runtime.num_eager_steps == 1
    finish(runtime)
    assert {tile_rows for _, tile_rows in recorder.shapes[len(FIRST) :]} == {1}, "trees are not tried again"
