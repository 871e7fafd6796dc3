"""Ranks of a model build the same backends together, use them together, and do without them together.

CUDA graphs stand for any such backend. A graph is here a function that is called again on the same tensors, and gloo
makes the sums inside of it: no GPU is needed, and none has been seen.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints
from tests.workers.attention.kernels import PlainKernel
from tests.workers.parallel.ranks import Followers, followed
from tests.workers.runtime.backends.test_cuda_graph import again, recording
from tests.workers.runtime.test_runtime import assert_same, held, random_tree, tokens
from workers.parallel import Rank
from workers.runtime import backends, runtime
from workers.runtime.backends.cuda_graph import CudaGraphBackend, Recorder
from workers.runtime.backends.packed_cpu import PackedBackend
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import StepRows

pytestmark = pytest.mark.thorough

SETTINGS: dict[str, Any] = {"compile": True, "max_step_tokens": 16, "kv_cache_tokens": 1024}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"))


@contextmanager
def graphs(recorder: Recorder) -> Iterator[None]:
    """In this process runtimes have such graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", (recording(recorder), PackedBackend))
        patch.setattr(runtime, "find_kernel", lambda _, **__: PlainKernel())
        yield


def fails_at_the_last(work: Any) -> Callable[[], None]:
    again(work)
    (shape,) = work.args
    if shape.num_rows == 1 and not shape.depth:  # it has done its part in all sums
        raise RuntimeError("out of memory")
    return partial(work)


def fails_later(work: Any) -> Callable[[], None]:
    """For one of the shapes that are recorded after the start."""
    replay = again(work)
    (shape,) = work.args
    if (shape.num_rows, shape.tile_rows) == (8, 1):  # it has done its part in all sums
        raise RuntimeError("out of memory")
    return replay


def computes_too_much(work: Any) -> Callable[[], None]:
    def wrong() -> None:
        work()
        work.func.__self__._logits.mul_(1.01)

    work()
    return wrong


def records(config: EngineConfig, rank: Rank) -> str:
    with graphs(again):
        return followed(config, rank)


def cannot_record_later(config: EngineConfig, rank: Rank) -> str:
    with graphs(fails_later):
        return followed(config, rank)


def cannot_record(config: EngineConfig, rank: Rank) -> str:
    with graphs(fails_at_the_last):
        return followed(config, rank)


def logits_of_steps(shared: ModelRuntime) -> torch.Tensor:
    """Logits of plain steps, a chain and a tree, of two sequences."""
    rng = random.Random(3)
    a, b = held(shared, tokens(rng, 7)), held(shared, tokens(rng, 12))
    steps = [[StepRows(a, [1]), StepRows(b, [2])], [StepRows(a, [3], random_tree(rng, 6))], [StepRows(b, [4, 5, 6])]]
    return torch.cat([shared.forward(step) for step in steps])


@pytest.fixture(scope="module")
def want(checkpoint: Path) -> torch.Tensor:
    return logits_of_steps(checkpoints.runtime(checkpoint))


@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_run_the_backend_of_a_single_process(
    kind: str, followers: Followers, checkpoint: Path, want: torch.Tensor
) -> None:
    settings = SETTINGS | {"tensor_parallel": 1, kind: 2}
    with graphs(again), followers.runtime(checkpoint, records, **settings) as shared:
        findings = shared.warm_up(lambda _: None)
        assert findings.is_compiled
        assert_same(logits_of_steps(shared), want)
        assert shared.num_eager_steps == 0


@pytest.mark.parametrize(
    ("recorder", "role", "reason"),
    [
        (again, cannot_record, "another rank cannot build it"),
        (fails_at_the_last, records, "out of memory"),
        (computes_too_much, records, "the compiled model's logits are off by"),
    ],
    ids=["a follower cannot", "rank 0 cannot", "the self-test fails"],
)
def test_what_one_rank_cannot_do_all_do_without(
    recorder: Recorder,
    role: Callable[[EngineConfig, Rank], str],
    reason: str,
    followers: Followers,
    checkpoint: Path,
    want: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with graphs(recorder), followers.runtime(checkpoint, role, **SETTINGS) as shared:
        with caplog.at_level(logging.WARNING, logger="workers"):
            findings = shared.warm_up(lambda _: None)
        assert reason in caplog.text
        assert not findings.is_compiled
        assert_same(logits_of_steps(shared), want)
        assert shared.num_eager_steps > 0


LATER = [2, 8, 16]
"""Numbers of sequences whose single rows are recorded after the start."""


def record_between_steps(shared: ModelRuntime, want: torch.Tensor) -> list[int]:
    """Record all shapes, with steps between; returns for how many sequences there are recordings."""
    assert_same(logits_of_steps(shared), want)
    while shared.build_more(is_idle=True):
        assert_same(logits_of_steps(shared), want)
    (backend,) = shared.backends._built
    assert isinstance(backend, CudaGraphBackend)
    return sorted(shape.num_rows for shape in backend._graphs if shape.tile_rows == 1)


@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel"])
def test_ranks_record_later_shapes_together_between_the_same_steps(
    kind: str, followers: Followers, checkpoint: Path, want: torch.Tensor
) -> None:
    """A sum of another shape than the other rank's fails, and one that another rank does not make waits for ever."""
    settings = SETTINGS | {"tensor_parallel": 1, kind: 2}
    with graphs(again), followers.runtime(checkpoint, records, **settings) as shared:
        shared.warm_up(lambda _: None)
        assert record_between_steps(shared, want) == sorted([1, 4, *LATER])
        assert shared.num_eager_steps == 0


@pytest.mark.parametrize(
    ("recorder", "role", "reason"),
    [(again, cannot_record_later, "another rank cannot build it"), (fails_later, records, "out of memory")],
    ids=["a follower cannot", "rank 0 cannot"],
)
def test_a_later_shape_that_one_rank_cannot_record_none_uses(
    recorder: Recorder,
    role: Callable[[EngineConfig, Rank], str],
    reason: str,
    followers: Followers,
    checkpoint: Path,
    want: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with graphs(recorder), followers.runtime(checkpoint, role, **SETTINGS) as shared:
        shared.warm_up(lambda _: None)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="workers"):
            assert record_between_steps(shared, want) == sorted({1, 4, *LATER} - {8})
        (line,) = caplog.records
        assert reason in line.getMessage()
        assert shared.num_eager_steps == 0
