"""Reads a checkpoint's tensors to their device: by several threads, each tensor straight into its own place.

To a GPU they go through pinned buffers: one is filled, which reads the file, while the other is sent. From other memory
CUDA copies at a fraction of the bus's pace, and the host waits for each copy. Knows views of files and one rank's parts
of them. Must not know models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from workers.model.experts import ParameterShards, each_expert, is_made
from workers.model.scaled import ScaledView
from workers.model.shards.sharding import Shard

NUM_READERS: Final = 8
"""Threads that read. A disk needs several requests at a time, and one thread copies less than a bus to a GPU takes."""
NUM_BUFFERS: Final = 2
"""Pinned buffers of a thread."""
BUFFER_BYTES: Final = 1 << 22
"""Size of a pinned buffer. torch keeps pinned memory for good, here 64 MiB a process."""


class TensorReader:
    """Reads the tensors that `views` has by name."""

    def __init__(self, views: Mapping[str, Any], device: torch.device) -> None:
        self._views, self._device = views, device
        self._one_in_floats = Lock()
        """Held while a quantised tensor is in the host's memory as float32."""
        self._buffers = SimpleQueue[PinnedBuffers]()
        for _ in range(NUM_READERS if device.type == "cuda" else 0):
            self._buffers.put(PinnedBuffers(device))

    def read_all(self, wanted: Iterable[tuple[str, Tensor, Shard | None]]) -> Iterator[Tensor]:
        """Each tensor in order, given its name, itself without memory, and the rank's part of its module."""
        with ThreadPoolExecutor(NUM_READERS, "reader") as readers:
            yield from readers.map(lambda each: self._read(*each), wanted)

    def _read(self, name: str, whole: Tensor, shard: Shard | None) -> Tensor:
        """This rank's part of a tensor, of which nothing else is read.

        On a CPU, a tensor that is stored as the model has it stays in the file's pages, and is read when it is used.
        """
        view, leaf = self._views[name], name.rpartition(".")[2]
        if is_made(view):
            return self._made(view, leaf, whole, shard)
        with self._one_in_floats if isinstance(view, ScaledView) else nullcontext():
            part: Tensor = view[...] if shard is None else shard.of(leaf, view)
            if self._device.type != "cuda":
                return part.contiguous().to(self._device, whole.dtype)
            value = torch.empty(part.shape, dtype=whole.dtype, device=self._device)
            self._copy(part, value)
            return value

    def _made(self, view: Any, leaf: str, whole: Tensor, shard: Shard | None) -> Tensor:
        """Experts that have to be put together: one at a time is in the host's memory beside them."""
        assert shard is None or isinstance(shard, ParameterShards), "experts are parameters"
        shape = whole.shape if shard is None else shard.of(leaf, whole).shape
        own = None if shard is None else shard.parts.get(leaf)
        value = torch.empty(shape, dtype=whole.dtype, device=self._device)
        for expert, place in zip(each_expert(view, len(whole), own), value, strict=True):
            self._copy(expert, place)
        return value

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if self._device.type != "cuda":
            target.copy_(source)
            return
        buffers = self._buffers.get()
        try:
            buffers.copy(source, target)
        finally:
            self._buffers.put(buffers)


class PinnedBuffers:
    """The pinned buffers that one thread uses at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._sent: list[Any] = [None] * NUM_BUFFERS
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy to the device, in the target's dtype. The device has it before its next work."""
        if target.nbytes <= BUFFER_BYTES:
            self._copy(source, target)
        elif len(target) == 1:
            self.copy(source[0], target[0])
        else:
            num_rows = max(1, BUFFER_BYTES * len(target) // target.nbytes)
            for first in range(0, len(target), num_rows):
                rows = slice(first, first + num_rows)
                self.copy(source[rows], target[rows])

    def _copy(self, source: Tensor, target: Tensor) -> None:
        self._turn = (self._turn + 1) % NUM_BUFFERS
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()
        buffer = self._buffers[self._turn][: target.nbytes].view(target.dtype).view(target.shape)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        self._sent[self._turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        self._sent[self._turn].record(torch.cuda.current_stream(self._device))
