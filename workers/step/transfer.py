"""Copies between host and device: asynchronous uploads, and one wait for all results.

A GPU runs asynchronously. When Python reads a value on it, Python waits until all queued work is done; so it does when
torch makes a tensor there from a list. So inputs of a step go by `upload`, those of sampling by one `Uploads`, and
results come by one `Readback`.
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
"""The id of the largest score of each row, and that score; to be called after the readback."""


def upload(
    values: list[Any] | tuple[Any, ...] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Values of the host as a tensor on the device; the copy is queued before the device's next work."""
    tensor = _tensor(values, dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensor(values: list[Any] | tuple[Any, ...] | NDArray[Any] | Tensor, dtype: torch.dtype | None) -> Tensor:
    """As `torch.as_tensor` makes it, in a third of the time for a short list. Numbers for float64 are not rounded."""
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
        """All that has been sent, in the order in which it was asked for."""

    def ask(
        self, values: list[Any] | tuple[Any, ...] | NDArray[Any], dtype: torch.dtype | None = None
    ) -> Callable[[], Tensor]:
        """Send these values, too, with the type that `upload` gives them.

        After `send` the result gives the tensor on the device.
        """
        index = len(self._there) + len(self._wanted)
        self._wanted.append(_tensor(values, dtype))
        return lambda: self._there[index]

    def send(self) -> None:
        """Queue one copy of all that was asked for since the last."""
        if self._wanted:
            self._there += self._wanted if self.device.type == "cpu" else _on_device(self._wanted, self.device)
            self._wanted.clear()


class Readback:
    """Reads any number of tensors of one device with one wait."""

    def __init__(self) -> None:
        self._wanted: list[Tensor] = []
        self._values: list[Any] = []
        """Of all that has been waited for, in the order in which it was asked for."""
        self._argmaxes: list[tuple[Tensor, Argmax]] = []

    def ask(self, tensor: Tensor) -> Callable[[], Any]:
        """Read this tensor, too, which must not be changed before `wait` returns.

        After that the result gives its values, as from `tolist`.
        """
        index = len(self._values) + len(self._wanted)
        self._wanted.append(tensor)
        return lambda: self._values[index]

    def argmax(self, scores: Tensor) -> Argmax:
        """Find the largest score of each row [R, V]: of several the one with the lowest id, and NaN if there is any.

        It is found once for all who ask for that of the same tensor, which must not be changed before `wait` returns.
        """
        known = next((argmax for of, argmax in self._argmaxes if of is scores), None)
        if known is None:
            known = _argmax_on_cpu(scores) if scores.device.type == "cpu" else self._ask_argmax(scores)
            self._argmaxes.append((scores, known))
        return known

    def _ask_argmax(self, scores: Tensor) -> Argmax:
        index = scores.argmax(dim=-1)
        ids, values = self.ask(index), self.ask(scores.gather(1, index[:, None]).squeeze(1))
        return lambda: (ids(), values())

    def wait(self) -> None:
        """Copy all tensors that were asked for to the host, in one copy from another device."""
        is_on_host = not self._wanted or self._wanted[0].device.type == "cpu"
        self._values += [tensor.tolist() for tensor in (self._wanted if is_on_host else _on_host(self._wanted))]
        self._wanted.clear()


def _argmax_on_cpu(scores: Tensor) -> Argmax:
    """By numpy, in a tenth of the time of torch; and as numbers, since each further operator costs more than a row."""
    rows = scores.numpy()
    ids = rows.argmax(axis=-1).tolist()
    values = [rows.item(row, token_id) for row, token_id in enumerate(ids)]
    return lambda: (ids, values)


def _on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These tensors of the host, in one copy."""
    return _packed(tensors, lambda packed: upload(packed, device))


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """These tensors of a device, in one copy."""
    return _packed(tensors, Tensor.cpu)


def _packed(tensors: Sequence[Tensor], copy: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """These tensors after one copy of all their bytes."""
    by_size = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)  # each begins at a multiple
    # A copy, for torch takes what has one element for contiguous, and then minds its strides.
    parts = [tensors[index].reshape(-1).clone(memory_format=torch.contiguous_format) for index in by_size]
    packed = copy(torch.cat([part.view(torch.uint8) for part in parts]))
    found, first = list(tensors), 0
    for index in by_size:
        tensor = tensors[index]
        end = first + prod(tensor.shape) * tensor.itemsize
        found[index] = packed[first:end].view(tensor.dtype).view(tensor.shape)
        first = end
    return found
