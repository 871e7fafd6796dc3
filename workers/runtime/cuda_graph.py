"""Steps as CUDA graphs: recorded at start for a few sizes, filled with a step's numbers by one copy, and run again.

On a GPU a small step is over before Python has asked for the next operation; a graph asks for all of them at once. It
has fixed shapes and fixed places in memory, so a step is laid out in the least form that has room for it
(`workers.step.paged_plan`), in one array of integers, with padding that reads and writes nothing of anybody's. All
graphs share that array, the tensor that logits are left in, and the memory for what is between.

What records is handed in, so that all but `CudaRecorder` can be tried without a GPU. Knows models and forms; must not
know sessions, nor what the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from core.errors import first_line
from workers.attention import Kernel, PagedStep
from workers.runtime.compiled import CannotCompile
from workers.step import Form, KVCache, Step, StepPlan, parts_of

MAX_ROWS = 256
"""Larger steps keep a GPU busy for longer than Python takes to ask for them."""
MAX_ANCESTORS = 32
"""Depth of a tree's nodes below its root."""

Work: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Work], Work]
"""Does the work, and answers what does the same again, on the same memory."""


class CudaRecorder:
    """Records what work asks of the GPU; all recordings share one pool of memory, so the largest comes first.

    Not run by any test of this project.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all, because memory is shared within a stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def __call__(self, work: Work) -> Work:
        work()  # libraries make their handles and choose their kernels at first use, which cannot be recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        replay: Work = graph.replay
        return replay


class NeedsGathering(Exception):
    """A layer asks for what the kernel does not do, and where gathered KV lies is in no tensor."""


class Inputs:
    """The integers of a step, where all graphs look for them."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_on_gpu = device.type == "cuda"
        self.values = torch.zeros(size, dtype=torch.int32, device=device)
        self._staged = torch.zeros(size, dtype=torch.int32, pin_memory=is_on_gpu)
        self._copied = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]  # torch's own

    def set(self, values: NDArray[Any]) -> None:
        """Copy `values` to the beginning, behind what the device has yet to do and without waiting for it."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one reads what is overwritten now
        staged = self._staged[: len(values)]
        staged.copy_(torch.from_numpy(values))
        self.values[: len(values)].copy_(staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.values.device))


class CapturedModel:
    """Computes what the model computes, for steps that one of its forms has room for."""

    def __init__(self, model: Any, cache: KVCache, kernel: Kernel, max_rows: int, context_tokens: int) -> None:
        self._model = model
        self._cache = cache
        self._kernel = kernel
        self._max_rows = min(MAX_ROWS, _power_of_two(max_rows))
        self._num_blocks = min(cache.num_blocks, cache.num_blocks_for(max(context_tokens, self._max_rows)))
        self._inputs = Inputs(max(form.num_values for form in self._forms()), cache.device)
        self._logits = torch.empty(self._max_rows, model.config.vocab_size, device=cache.device)
        self._graphs: dict[Form, Work] = {}

    def __call__(self, step: Step) -> Tensor | None:
        """Write the step's KV, and answer the logits of its wanted rows, float32.  # [rows, vocab]

        None, and nothing done, where no form has room for it.
        """
        parts = parts_of(step.spans)
        form = self._form_of(Form.of(self._cache, step, parts))
        if form not in self._graphs:
            return None
        self._inputs.set(form.fill(self._cache, step, parts))
        self._graphs[form]()
        return self._logits[: len(step.wanted)].clone()  # the next step leaves its own there

    @torch.inference_mode()
    def record(self, recorder: Recorder, progress: Callable[[str], None]) -> CapturedModel:
        """Make the graphs. Raises: CannotCompile where there are none to be made."""
        progress(f"recording steps of up to {self._max_rows} rows")
        began_s = monotonic()
        forms = list(self._forms())
        reason = ""
        for form in forms:
            self._inputs.set(form.blank(self._cache))
            try:
                self._graphs[form] = recorder(partial(self._run, form))
            except NeedsGathering as error:
                reason = str(error)
            except RuntimeError as error:  # of CUDA, or of a model that asks what is in a tensor
                raise CannotCompile(first_line(error)) from error
        if not self._graphs:
            raise CannotCompile(reason)
        progress(f"recorded {len(self._graphs)} of {len(forms)} forms of steps in {monotonic() - began_s:.0f} s")
        return self

    def _run(self, form: Form) -> None:
        """From the inputs to the logits, as the graph of this form does it."""
        step = PagedStep.of(form, self._inputs.values, self._cache, self._kernel, _refuse)
        output = self._model(
            input_ids=step.ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=step.wanted,
            plan=step.plan,
        )
        self._logits[: form.num_wanted].copy_(output.logits[0])

    def _forms(self) -> Iterator[Form]:
        """The largest first: for each number of rows that is a power of two, with trees, with chains, and with a row of
        each sequence."""
        num_rows = self._max_rows
        while num_rows:
            yield self._form(num_rows, num_rows, MAX_ANCESTORS)
            if num_rows > 1:
                yield self._form(num_rows, num_rows, 0)
            yield self._form(num_rows, 1, 0)
            num_rows //= 2

    def _form(self, num_rows: int, longest: int, num_ancestors: int) -> Form:
        """Each row may be wanted, and be a part of its own."""
        return Form(num_rows, num_rows, num_rows, self._num_blocks, longest, num_ancestors)

    def _form_of(self, needed: Form) -> Form | None:
        """The least with room for what is needed; larger ones than there are have no graph."""
        if needed.num_blocks > self._num_blocks or needed.num_ancestors > MAX_ANCESTORS:
            return None
        num_rows = _power_of_two(needed.num_rows)
        if needed.num_ancestors:
            return self._form(num_rows, num_rows, MAX_ANCESTORS)
        return self._form(num_rows, 1 if needed.longest == 1 else num_rows, 0)


def _refuse() -> StepPlan:
    raise NeedsGathering("a layer gathers KV, and where that lies is in no tensor")


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()
