"""Recorded steps compute what the model does, whatever ran before; steps without a recording run as they would.

A recording is here a function that is called again on the same tensors: no GPU is needed, and none has been seen.
"""

from __future__ import annotations

import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from core.speculation.token_tree import EMPTY_BLOCK, ROOT, TokenTree
from tests import checkpoints
from tests.workers.attention.kernels import PlainKernel
from tests.workers.engine.driving import EPOCH, Driver, chain, wrong
from tests.workers.runtime import test_runtime
from tests.workers.runtime.test_runtime import (
    assert_same,
    eager_logits,
    held,
    in_all_ways,
    path_tokens,
    random_tree,
    tokens,
)
from workers.engine.target import TargetEngine
from workers.model.loader import load
from workers.runtime import backends
from workers.runtime.backends.cuda_graph import CudaGraphBackend, CudaRecorder, Inputs, Recorder
from workers.runtime.backends.packed_cpu import PackedBackend
from workers.runtime.runtime import ModelRuntime
from workers.runtime.self_test import SelfTest
from workers.runtime.tiling import GPU_DETERMINISTIC
from workers.step.kv_cache import NUM_OWN_BLOCKS, SINK_BLOCK
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough


def again(work: Callable[[], None]) -> Callable[[], None]:
    """Records by remembering the function."""
    work()
    return work


def recording(by: Recorder) -> type[CudaGraphBackend]:
    """CUDA graphs on any device, as `by` records them."""

    class Recording(CudaGraphBackend):
        @classmethod
        def supports(cls, config: EngineConfig) -> bool:
            return config.compile

        def recorder(self) -> Recorder:
            return by

    return Recording


def cold(path: Path, recorder: Recorder = again, kernel: Any = None, **settings: Any) -> ModelRuntime:
    config = EngineConfig(**{"model": str(path), "kv_cache_tokens": 8192, "compile": True} | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", (recording(recorder), PackedBackend))
        return ModelRuntime(load(config, lambda _: None), config, kernel=kernel)


def warm(path: Path, recorder: Recorder = again, **settings: Any) -> ModelRuntime:
    runtime = cold(path, recorder, PlainKernel(), **settings)
    runtime.warm_up(lambda _: None)
    return runtime


def backend_of(runtime: ModelRuntime) -> CudaGraphBackend:
    (backend,) = runtime.backends._built
    assert isinstance(backend, CudaGraphBackend)
    return backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> ModelRuntime:
    return warm(checkpoint)


@pytest.fixture
def runtime(recorded: ModelRuntime) -> Iterator[ModelRuntime]:
    """One whose every step in a test has to be a recorded one."""
    recorded.backends.num_base_steps = 0
    yield recorded
    assert recorded.num_eager_steps == 0


@pytest.fixture(scope="module")
def eager() -> Any:
    return checkpoints.build("llama")


@pytest.mark.parametrize(
    "test",
    [
        test_runtime.test_prefill_decode_chain_and_tree_in_one_step_equal_eager,
        lambda runtime, eager: test_runtime.test_a_tree_equals_its_paths_taken_one_by_one(runtime, eager, 0),
        lambda runtime, eager: test_runtime.test_a_tree_that_grows_step_by_step_beside_others_equals_its_paths(
            runtime, eager, 0
        ),
        test_runtime.test_an_accepted_path_is_compacted_into_what_a_fresh_sequence_holds,
        test_runtime.test_after_a_rollback_nothing_of_the_rejected_tokens_is_left,
        lambda runtime, _: test_runtime.test_a_broken_neighbour_spoils_no_one(runtime),
        lambda runtime, _: test_runtime.test_a_step_in_which_nobody_wants_logits_has_none(runtime),
    ],
    ids=["all at once", "tree", "growing tree", "compacted", "rolled back", "broken neighbour", "no logits"],
)
def test_what_holds_of_steps_holds_of_recorded_ones(runtime: ModelRuntime, eager: Any, test: Any) -> None:
    test(runtime, eager)


def test_steps_and_batches_of_all_sizes_agree(runtime: ModelRuntime, eager: Any) -> None:
    rng = random.Random(5)
    seqs, nexts = [tokens(rng, rng.randint(1, 60)) for _ in range(5)], [tokens(rng, 8) for _ in range(5)]
    want = torch.stack([eager_logits(eager, [*ids, *some])[-8:] for ids, some in zip(seqs, nexts, strict=True)])
    for got in in_all_ways(runtime, seqs, nexts):
        assert_same(got, want)


def test_of_what_a_larger_step_left_behind_nothing_is_read(runtime: ModelRuntime, eager: Any) -> None:
    """Nor of the KV of sequences that were rolled back, preempted or ended."""
    rng = random.Random(6)
    prefix, tree = tokens(rng, 40), random_tree(rng, 9)
    kv = held(runtime, prefix[:-1])
    others = [held(runtime, tokens(rng, 20)) for _ in range(5)]
    runtime.forward([StepRows(other, tokens(rng, 2), random_tree(rng, 12)) for other in others])
    for other in others:
        runtime.cache.truncate(other, 7)
        runtime.cache.free(other)
    in_use = {runtime.cache.slot(kv, row) for row in range(kv.num_tokens)}
    free = [slot for slot in range(SINK_BLOCK * 16, len(runtime.cache.keys[0])) if slot not in in_use]
    for pool in (*runtime.cache.keys, *runtime.cache.values):
        pool[free] = torch.nan
    backend_of(runtime)._inputs.values.fill_(3)
    backend_of(runtime)._logits.fill_(torch.nan)
    got = runtime.forward([StepRows(kv, prefix[-1:], tree)])
    want = [eager_logits(eager, prefix + path_tokens(tree, node))[-1] for node in range(ROOT, len(tree))]
    assert_same(got, torch.stack(want))
    runtime.cache.free(kv)
    for pool in (*runtime.cache.keys, *runtime.cache.values):
        pool[SINK_BLOCK * 16 :] = 0.0  # for the tests that follow


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_single_nodes_below_cached_ones_equal_their_paths(
    runtime: ModelRuntime, eager: Any, num_sequences: int
) -> None:
    """Each sequence has one row, and still sees a tree."""
    rng = random.Random(10)
    prefixes = [tokens(rng, 10) for _ in range(num_sequences)]
    tree = TokenTree((5, 6, 7), (ROOT, ROOT, 0))
    kvs = [held(runtime, prefix[:-1]) for prefix in prefixes]
    runtime.forward([StepRows(kv, prefix[-1:], tree.prefix(2)) for kv, prefix in zip(kvs, prefixes, strict=True)])
    got = runtime.forward([StepRows(kv, [], tree, num_cached_nodes=2) for kv in kvs])
    assert_same(got, torch.stack([eager_logits(eager, [*prefix, 5, 7])[-1] for prefix in prefixes]))


def test_logits_stay_what_they_were(runtime: ModelRuntime) -> None:
    kv = held(runtime, [1, 2, 3])
    first = runtime.forward([StepRows(kv, [4])])
    before = first.clone()
    runtime.forward([StepRows(kv, [5])])
    assert torch.equal(first, before)


def test_recording_and_padding_write_to_the_sink_alone(checkpoint: Path) -> None:
    runtime = cold(checkpoint, kernel=PlainKernel(), kv_cache_tokens=128, max_step_tokens=8)
    recording(again)(runtime.context).warm_up(lambda _: None)
    size = runtime.cache.block_tokens
    for pool in (*runtime.cache.keys, *runtime.cache.values):
        assert pool[SINK_BLOCK * size : NUM_OWN_BLOCKS * size].any()
        pool[SINK_BLOCK * size : NUM_OWN_BLOCKS * size] = 0.0
        assert not pool.any()


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [(1, [1]), (5, [8, 4, 2, 1]), (2048, [*range(512, 256, -16), *range(256, 0, -8), 4, 2, 1])],
)
def test_the_largest_is_recorded_first_and_there_are_few(
    checkpoint: Path, max_step_tokens: int, sizes: list[int]
) -> None:
    runtime = cold(checkpoint, kv_cache_tokens=1024, max_step_tokens=max_step_tokens)
    shapes = CudaGraphBackend(runtime.context)._shapes
    assert list(dict.fromkeys(shape.num_rows for shape in shapes)) == sizes
    assert len(set(shapes)) == len(shapes) == 2 * len(sizes) - 1
    assert shapes[0].num_values == max(shape.num_values for shape in shapes)


def test_padding_to_two_rows_has_a_shape_where_steps_have_one(checkpoint: Path) -> None:
    """Deterministic steps on a GPU are padded so."""
    runtime = cold(checkpoint, kv_cache_tokens=1024, max_step_tokens=1)
    runtime.context.tiling = GPU_DETERMINISTIC
    assert [shape.num_rows for shape in CudaGraphBackend(runtime.context)._shapes] == [2]


def test_what_no_form_has_room_for_runs_as_it_would_and_is_counted(recorded: ModelRuntime, eager: Any) -> None:
    rng = random.Random(7)
    many, deep = tokens(rng, 30), TokenTree(tuple(tokens(rng, 70)), (ROOT, *range(68), ROOT))
    recorded.backends.num_base_steps = 0
    kv = recorded.cache.new_sequence()
    assert_same(recorded.forward([StepRows(kv, many)]), eager_logits(eager, many)[-1:])
    assert recorded.num_eager_steps == 0
    got = recorded.forward([StepRows(kv, [9], deep)])
    assert_same(got[-2:], torch.stack([eager_logits(eager, [*many, 9, *path_tokens(deep, n)])[-1] for n in (68, 69)]))
    assert recorded.num_eager_steps == 1


def test_a_model_with_a_window_shorter_than_trees_may_be_has_them_gathered(tmp_path: Path) -> None:
    runtime, eager = warm(checkpoints.write("mistral", tmp_path), max_step_tokens=32), checkpoints.build("mistral")
    rng = random.Random(8)
    prefix, tree = tokens(rng, 40), random_tree(rng, 6)
    kv = held(runtime, prefix[:30])
    runtime.backends.num_base_steps = 0
    for token in prefix[30:]:
        got = runtime.forward([StepRows(kv, [token])])
    assert_same(got, eager_logits(eager, prefix)[-1:])
    assert runtime.num_eager_steps == 0
    got = runtime.forward([StepRows(kv, [9], tree)])
    want = [eager_logits(eager, [*prefix, 9, *path_tokens(tree, node)])[-1] for node in range(ROOT, len(tree))]
    assert_same(got, torch.stack(want))
    assert runtime.num_eager_steps == 1


def fails(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def forgets(work: Callable[[], None]) -> Callable[[], None]:
    """Its recordings do nothing."""
    work()
    return lambda: None


def forgets_trees(work: Any) -> Callable[[], None]:
    """So does this, for steps with trees."""
    (shape,) = work.args
    return forgets(work) if shape.depth else again(work)


def forgets_company(work: Any) -> Callable[[], None]:
    """And this for a row of each of several sequences."""
    (shape,) = work.args
    return forgets(work) if shape.tile_rows == 1 and shape.num_rows > 1 else again(work)


@pytest.mark.parametrize(
    ("family", "recorder", "reason"),
    [
        ("llama", fails, "operation not permitted when stream is capturing"),
        ("llama", forgets, "the compiled model's logits are off by"),
        ("llama", forgets_trees, "the compiled model's logits are off by"),
        ("llama", forgets_company, "the compiled model's logits are off by"),
    ],
)
def test_what_cannot_be_recorded_is_said_and_serves(
    family: str, recorder: Recorder, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="workers.runtime"):
        runtime = warm(checkpoints.write(family, tmp_path), recorder, max_step_tokens=16)
    (line,) = [record.getMessage() for record in caplog.records if "compiled" in record.getMessage()]
    assert line.startswith(f"{runtime.info.name} does not run compiled, so that every step takes longer: {reason}")
    kv, prompt = runtime.cache.new_sequence(), tokens(random.Random(9), 10)
    got = runtime.forward([StepRows(kv, prompt)])
    assert_same(got, eager_logits(checkpoints.build(family), prompt)[-1:])
    assert runtime.num_eager_steps == 1


def test_each_backend_that_costs_equal_bits_is_dropped(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (recording(again), recording(again), PackedBackend))
    config = EngineConfig(str(checkpoint), kv_cache_tokens=1024, compile=True, deterministic=True, max_step_tokens=8)
    runtime = ModelRuntime(load(config, lambda _: None), config, kernel=PlainKernel())
    monkeypatch.setattr(SelfTest, "is_batch_invariant", lambda _: not runtime.backends._built)
    with caplog.at_level(logging.WARNING):
        findings = runtime.warm_up(lambda _: None)
    assert caplog.text.count("its bits depend on the number of rows") == 2
    assert "NOT met" not in caplog.text
    assert findings.tile_rows is not None


def test_where_kv_is_gathered_nothing_is_recorded(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime = cold(checkpoint, kv_cache_tokens=1024, max_step_tokens=8)
    with caplog.at_level(logging.WARNING, logger="workers.runtime"):
        runtime.warm_up(lambda _: None)
    assert "its attention gathers KV" in caplog.text


def test_an_engine_writes_what_it_writes_without(recorded: ModelRuntime, checkpoint: Path) -> None:
    """Prompts, plain steps, trees and chains of which some guesses stand, of two sessions."""
    config = EngineConfig(str(checkpoint), kv_cache_tokens=1024)
    plain = ModelRuntime(load(config, lambda _: None), config)
    texts = []
    for runtime in (recorded, plain):
        engine = TargetEngine(runtime, config, EPOCH)
        drivers = [Driver(engine, tokens(random.Random(seed), 20 + seed), session=str(seed)) for seed in range(2)]
        for driver in drivers:
            first = driver.run(1)[0]
            for block in (chain(first, wrong(first)), TokenTree((1, 2, 3, 4), (ROOT, ROOT, 1, 0)), EMPTY_BLOCK):
                driver.verify(block)
            guess = driver.run(1)[0]
            driver.verify(TokenTree((guess, wrong(guess), guess), (ROOT, ROOT, 0)))
        texts.append([list(driver.log.tokens) for driver in drivers])
        engine.release(["0", "1"])
    assert texts[0] == texts[1]


def test_progress_is_shown(checkpoint: Path) -> None:
    lines: list[str] = []
    cold(checkpoint, kernel=PlainKernel(), kv_cache_tokens=1024, max_step_tokens=8).warm_up(lines.append)
    assert lines[0] == "recording steps of up to 8 rows"
    assert lines[1].startswith("recorded 5 of 7 shapes of steps in ")
    assert lines[1].endswith(" s; 2 others follow while it is idle")


def test_inputs_are_copied_to_where_they_were() -> None:
    inputs = Inputs(5, torch.device("cpu"))
    before = inputs.values.data_ptr()
    inputs.set(torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32).numpy())
    inputs.set(torch.tensor([7, 8], dtype=torch.int32).numpy())
    assert inputs.values.tolist() == [7, 8, 3, 4, 5]
    assert inputs.values.data_ptr() == before


def test_cuda_is_asked_to_record_after_a_first_run_and_in_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class FakeGraph:
        def replay(self) -> None:
            events.append("replay")

    signature = inspect.signature(torch.cuda.graph.__init__)

    @contextmanager
    def fake_graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        bound = signature.bind(None, *args, **kwargs).arguments
        assert (bound["pool"], bound["stream"]) == ("the pool", "the stream")
        assert bound["capture_error_mode"] == "thread_local"
        events.append("begin")
        yield
        events.append("end")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: "the stream")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fake_graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", events.append)
    replay = CudaRecorder(torch.device("cuda"))(lambda: events.append("work"))
    replay()
    assert events == ["work", "begin", "work", "end", "before", "replay"]

    def fails_while_recording() -> None:
        assert "begin" not in events
        events.append("work")

    events.clear()
    with pytest.raises(AssertionError):
        CudaRecorder(torch.device("cuda"))(fails_while_recording)
    assert events == ["work", "begin", "before"], "steps go on where they were"


def test_two_engines_of_a_process_record_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = threading.Lock()

    @contextmanager
    def fake_graph(*_: Any, **__: Any) -> Iterator[None]:
        assert recording.acquire(blocking=False), "while another is recorded"
        time.sleep(0.01)
        yield
        recording.release()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    for name in ("Stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "graph", fake_graph)
    recorders = [CudaRecorder(torch.device("cuda")) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda recorder: [recorder(lambda: None) for _ in range(5)], recorders))
