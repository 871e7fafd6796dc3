"""Backend for a GPU: steps as CUDA graphs, recorded for a few shapes, filled by one copy and replayed.

A GPU computes a small step in less time than Python takes to launch its operators. A graph launches all of them at
once. A graph's shapes and addresses are fixed, so a step is padded to the smallest recorded shape with room for it
(`workers.step.paged_plan`) and sent as one array of integers. Padding touches no sequence. All graphs share that array,
the tensor of logits, and the memory of intermediate results.

A tenth of the shapes are recorded at start, and have room for every step. The others only save padding: they are
recorded while the engine is idle, or when they have been needed often.

A subclass may record in another way, so that everything but `CudaRecorder` can be tested without a GPU. Knows models
and shapes; must not know sessions, nor what the rows stand for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from core.config import EngineConfig
from core.errors import first_line
from workers.attention import inputs_in_shape
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable
from workers.step import Step, StepPlan, StepShape
from workers.step.paged_plan import TILE_ROWS

MAX_ROWS = 512
"""Larger steps are not recorded: the GPU takes longer for them than Python takes to launch them."""
TREE_WORDS = 8
"""Words of a row's bitmask, 32 nodes each: enough for the largest block (`core.config.speculation`)."""
SEQUENCES_AT_START = (1, 4)
"""Numbers of sequences, with one row each, that are recorded at start: the self-test has steps of both."""
RECORD_AFTER = 500
"""Number of steps that must have needed a shape before a busy engine records it. On paper a recording of an 8B takes
150 to 360 ms and saves each step 0.3 to 2 ms, so it pays for itself in 75 to 1,200 steps (docs/adr/gpu-runtime)."""
NUM_STAGED = 3
"""Number of steps whose integers may wait on the host for the device."""
TREE_DEPTH = 64
"""Largest number of levels of a tree below its root."""

Work: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Work], Work]
"""Does the work, and returns a function that repeats it on the same memory."""


class CudaRecorder:
    """Records a CUDA graph. All graphs share one memory pool, so the largest is recorded first.

    The tests of this project run it without a GPU only, with fakes of torch's functions.
    """

    _recording = threading.Lock()
    """A process records one graph at a time, also if it has two engines: to begin one waits for the whole device, which
    CUDA refuses while another is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs, because memory is shared within a stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def __call__(self, work: Work) -> Work:
        work()  # libraries create handles and choose kernels at first use, which cannot be recorded
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with (
                self._recording,
                torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
            ):
                work()
        finally:
            torch.cuda.set_stream(stream)  # torch stays on the other one if it cannot end a recording
        replay: Work = graph.replay
        return replay


class Inputs:
    """The integers of a step, at the fixed address that all graphs read."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self.values = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=self._is_on_gpu) for _ in range(NUM_STAGED)]
        self._copied: list[Any] = [None] * NUM_STAGED
        self._turn = 0

    def set(self, values: NDArray[Any]) -> None:
        """Copy `values` to the beginning of the array, in stream order, without waiting for earlier steps."""
        self._turn = (self._turn + 1) % NUM_STAGED
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # the copy of some steps ago reads this staging buffer
        staged = self._staged[self._turn][: len(values)]
        staged.copy_(torch.from_numpy(values))
        self.values[: len(values)].copy_(staged, non_blocking=True)
        if self._is_on_gpu:
            self._copied[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
            self._copied[self._turn].record(torch.cuda.current_stream(self.values.device))


class CudaGraphBackend(Backend):
    """Replays a graph for each step that fits into a recorded shape."""

    def __init__(self, context: BackendContext, below: Backend | None = None) -> None:
        super().__init__(context, below)
        cache, config = context.cache, context.config
        self._max_rows = bucket_of(min(MAX_ROWS, context.tiling.rows(config.max_step_tokens)))
        self._num_blocks = min(cache.num_blocks, cache.num_blocks_for(max(context.max_context_tokens, self._max_rows)))
        self._shapes = list(self._all_shapes())
        self._inputs = Inputs(max(shape.num_values for shape in self._shapes), cache.device)
        self._logits = torch.empty(self._max_rows, context.row_width, device=cache.device)
        self._graphs: dict[StepShape, Work] = {}
        self._num_needed: dict[StepShape, int] = {}
        """Number of steps that needed a shape which is yet to be recorded."""

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return config.compile and torch.device(config.device).type != "cpu"

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Record the shapes that are recorded at start. Raises: BackendUnavailable if none can be recorded."""
        if self.context.kernel is None:
            raise BackendUnavailable("its attention gathers KV, whose addresses change from step to step")
        progress(f"recording steps of up to {self._max_rows} rows")
        began_s = monotonic()
        self._recorder = self.recorder()
        self._record_first()
        num_shapes = f"{len(self._graphs)} of {len(self._shapes)} shapes of steps"
        rest = f"; {len(self._num_needed)} others follow while it is idle" if self._num_needed else ""
        progress(f"recorded {num_shapes} in {monotonic() - began_s:.0f} s{rest}")

    def due(self, *, is_idle: bool) -> int | None:
        needed = self._num_needed
        shape = max(needed, key=lambda each: (needed[each], -each.num_rows), default=None)
        if shape is None or not (is_idle or needed[shape] >= RECORD_AFTER):
            return None
        del needed[shape]
        return self._shapes.index(shape)

    @torch.inference_mode()
    def build_part(self, part: int) -> Callable[[], None]:
        shape = self._shapes[part]
        try:
            return partial(self._graphs.__setitem__, shape, self._record(shape))
        except Exception as error:  # as at start
            what = f"steps of {shape.num_rows} rows are not recorded, and computed with more"
            raise BackendUnavailable(f"{what}: {first_line(error)}") from error

    def run(self, step: Step) -> Tensor | None:
        cache, tiling = self.context.cache, self.context.tiling
        shape = self._shape_for(StepShape.of(cache, step, tiling))
        if shape is not None and shape not in self._graphs:
            shape = self._larger(shape)
        if shape is None:
            return None
        self._inputs.set(shape.fill(cache, step, tiling))
        self._graphs[shape]()
        return self._logits[: len(step.wanted)].clone()  # the next step overwrites them

    def recorder(self) -> Recorder:
        return CudaRecorder(self.context.cache.device)

    def _record_first(self) -> None:
        """Record the shapes of the start, and note which others can be recorded later."""
        reason = ""
        first = [shape for shape in self._shapes if self._is_first(shape)]
        for shape in first:
            try:
                self._graphs[shape] = self._record(shape)
            except BackendUnavailable as error:  # other shapes may not need it
                reason = str(error)
            except Exception as error:  # from CUDA, from Triton, or from a model that reads a tensor's values
                raise BackendUnavailable(first_line(error)) from error
        if not self._graphs:
            raise BackendUnavailable(reason)
        kinds = {shape.tile_rows for shape in self._graphs}
        self._num_needed = {each: 0 for each in self._shapes if each not in first and each.tile_rows in kinds}

    def _is_first(self, shape: StepShape) -> bool:
        """Whether a shape is recorded at start: those that the warm-up times or tests, and the largest.

        The largest takes the memory that all share, and no shape that is recorded later needs more.
        """
        if shape.tile_rows == 1:
            return shape.num_rows in SEQUENCES_AT_START
        return shape.num_rows == self._max_rows or shape.num_rows.bit_count() == 1

    def _record(self, shape: StepShape) -> Work:
        self._inputs.set(shape.blank(self.context.cache))
        return self._recorder(partial(self._replay, shape))

    def _replay(self, shape: StepShape) -> None:
        """The work that is recorded for this shape: from the inputs to the logits."""
        context = self.context
        assert context.kernel is not None, "without a kernel nothing is recorded"
        inputs = inputs_in_shape(shape, self._inputs.values, context.cache, context.kernel, _refuse)
        logits = (self.below or self).logits(*inputs)
        self._logits[: shape.num_wanted].copy_(logits)

    def _all_shapes(self) -> Iterator[StepShape]:
        """All shapes, largest first. For each number of rows: one for any rows, one for one row per sequence."""
        for num_rows in reversed(buckets(self._max_rows)):
            if num_rows > 1:
                yield self._shape(num_rows, TILE_ROWS)
            if not self.context.tiling.by_branch:
                yield self._shape(num_rows, 1)

    def _shape(self, num_rows: int, tile_rows: int) -> StepShape:
        """A shape in which every row may be wanted and may be a tile and a sequence of its own."""
        may_be_tree = tile_rows > 1 and not self.context.tiling.by_branch
        words, depth = (TREE_WORDS, TREE_DEPTH) if may_be_tree else (0, 0)
        block_tokens = self.context.cache.block_tokens
        return StepShape(
            num_rows, num_rows, num_rows, num_rows, self._num_blocks, words, depth, tile_rows, block_tokens
        )

    def _shape_for(self, needed: StepShape) -> StepShape | None:
        """The smallest shape with room for the step; None if there is none."""
        is_too_large = needed.num_rows > self._max_rows or needed.num_blocks > self._num_blocks
        if is_too_large or needed.num_words > TREE_WORDS or needed.depth > TREE_DEPTH:
            return None
        if needed.block_tokens != self.context.cache.block_tokens:  # branches of a tree, each with slots of its own
            return None
        least = 1 if needed.tile_rows == 1 else 2  # a shape with tiles is not recorded for a single row
        return self._shape(bucket_of(max(needed.num_rows, least)), needed.tile_rows)

    def _larger(self, shape: StepShape) -> StepShape | None:
        """The smallest recorded shape that has room for each step of `shape`, which is counted as needed."""
        roomy = (each for each in self._graphs if each.num_rows >= shape.num_rows and each.tile_rows >= shape.tile_rows)
        found = min(roomy, key=lambda each: (each.num_rows, each.tile_rows), default=None)
        if shape in self._num_needed:
            self._num_needed[shape] += 1 if found is not None else RECORD_AFTER
        return found


def _refuse() -> StepPlan:
    raise BackendUnavailable("a layer gathers KV, which a CUDA graph cannot replay")


def bucket_of(num_rows: int) -> int:
    """Round up to a recorded number of rows: powers of two to 8, multiples of 8 to 256, then multiples of 16."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    multiple = 8 if num_rows <= 256 else 16
    return -(-num_rows // multiple) * multiple


def buckets(max_rows: int) -> list[int]:
    """All recorded numbers of rows up to that for `max_rows`, in ascending order."""
    return sorted({bucket_of(num_rows) for num_rows in range(1, max_rows + 1)})
