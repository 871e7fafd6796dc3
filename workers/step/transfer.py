"""Copies between host and device: asynchronous uploads, and one wait for all results.

A GPU runs asynchronously. Python waits for all queued work when it reads a value from the GPU, and when torch makes a
GPU tensor from a list. The inputs of a step therefore go through `upload`, those of sampling through one `Uploads`, and
all results through one `Readback`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Argmax: TypeAlias = Callable[[], tuple[list[int], list[float]]]
"""Returns the id of the largest score of each row, and that score. Call it after the readback."""


def upload(
    values: list[Any] | tuple[Any, ...] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy host values to a tensor on the device. The copy is queued before the device's next work."""
    tensor = _tensor(values, dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensor(values: list[Any] | tuple[Any, ...] | NDArray[Any] | Tensor, dtype: torch.dtype | None) -> Tensor:
    """Like `torch.as_tensor`, in a third of the time for a short list. A list of floats gives float32 by default."""
    if isinstance(values, Tensor):
        return values if dtype is None else values.type(dtype)
    tensor = torch.from_numpy(np.asarray(values))
    is_of_floats = tensor.dtype == torch.float64 and not isinstance(values, np.ndarray)
    tensor = tensor.float() if is_of_floats and dtype != torch.float64 else tensor
    return tensor if dtype is None else tensor.type(dtype)


class Uploads:
    """Sends any number of tensors to one device in one copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wanted: list[Tensor] = []
        self._there: list[Tensor] = []
        """Tensors that have been sent, in the order of `add`."""

    def add(
        self, values: list[Any] | tuple[Any, ...] | NDArray[Any], dtype: torch.dtype | None = None
    ) -> Callable[[], Tensor]:
        """Add values to the next copy, with the dtype that `upload` gives them.

        After `send`, the returned function gives the tensor on the device.
        """
        index = len(self._there) + len(self._wanted)
        self._wanted.append(_tensor(values, dtype))
        return lambda: self._there[index]

    def send(self) -> None:
        """Queue one copy of all values added since the last call."""
        if self._wanted:
            self._there += self._wanted if self.device.type == "cpu" else _on_device(self._wanted, self.device)
            self._wanted.clear()


class Readback:
    """Reads any number of tensors of one device with one wait."""

    def __init__(self) -> None:
        self._wanted: list[Tensor] = []
        self._readers: list[Callable[[Tensor], Any]] = []
        """How to read each wanted tensor."""
        self._values: list[Any] = []
        """Values that have been read, in the order of `add`."""
        self._argmaxes: list[tuple[Tensor, Argmax]] = []

    def add(self, tensor: Tensor) -> Callable[[], Any]:
        """Add a tensor to the next copy; it must not change before `wait` returns.

        After `wait`, the returned function gives the tensor's values, as from `tolist`.
        """
        return self._add(tensor, Tensor.tolist)

    def add_bytes(self, tensor: Tensor) -> Callable[[], bytes]:
        """Like `add`, for the tensor's bytes."""
        return self._add(tensor.contiguous().view(torch.uint8), lambda values: values.numpy().tobytes())

    def _add(self, tensor: Tensor, read: Callable[[Tensor], Any]) -> Callable[[], Any]:
        index = len(self._values) + len(self._wanted)
        self._wanted.append(tensor)
        self._readers.append(read)
        return lambda: self._values[index]

    def argmax(self, scores: Tensor) -> Argmax:
        """Find the largest score of each row [R, V]. The lowest id wins a tie; NaN counts as the largest.

        Computed once for each tensor, however often it is asked for. The tensor must not change before `wait` returns.
        """
        known = next((argmax for of, argmax in self._argmaxes if of is scores), None)
        if known is None:
            known = _argmax_on_cpu(scores) if scores.device.type == "cpu" else self._add_argmax(scores)
            self._argmaxes.append((scores, known))
        return known

    def _add_argmax(self, scores: Tensor) -> Argmax:
        index = scores.argmax(dim=-1)
        ids, values = self.add(index), self.add(scores.gather(1, index[:, None]).squeeze(1))
        return lambda: (ids(), values())

    def wait(self) -> None:
        """Copy all added tensors to the host; from a GPU in one copy."""
        is_on_host = not self._wanted or self._wanted[0].device.type == "cpu"
        tensors = self._wanted if is_on_host else _on_host(self._wanted)
        self._values += [read(tensor) for read, tensor in zip(self._readers, tensors, strict=True)]
        self._wanted.clear()
        self._readers.clear()


def _argmax_on_cpu(scores: Tensor) -> Argmax:
    """Argmax by numpy, in a tenth of torch's time. Scores are read one by one: an operator would cost more."""
    rows = scores.numpy()
    ids = rows.argmax(axis=-1).tolist()
    values = [rows.item(row, token_id) for row, token_id in enumerate(ids)]
    return lambda: (ids, values)


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device, in one copy."""
    return _packed(tensors, lambda packed: upload(packed, device))


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy device tensors to the host, in one copy."""
    return _packed(tensors, Tensor.cpu)


def _packed(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Copy all bytes of these tensors at once."""
    by_size = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)  # keeps each of them aligned
    # clone: torch calls a tensor of one element contiguous, whatever its strides, but `view` rejects odd strides.
    parts = [tensors[index].reshape(-1).clone(memory_format=torch.contiguous_format) for index in by_size]
    packed = copy(torch.cat([part.view(torch.uint8) for part in parts]))
    found, first = list(tensors), 0
    for index in by_size:
        tensor = tensors[index]
        end = first + prod(tensor.shape) * tensor.itemsize
        found[index] = packed[first:end].view(tensor.dtype).view(tensor.shape)
        first = end
    return found
