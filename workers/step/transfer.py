"""Between host and device: uploads that nobody waits for, and results that are waited for together.

A GPU works behind Python's back. Whenever Python looks at a number there, it waits until everything that it has asked
for is done, and so it does when torch makes a tensor there of a list. So whatever a step needs goes by `upload`, and
whatever it has to see comes by one `Readback`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: list[Any] | tuple[Any, ...] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers of the host as a tensor on the device, there by the time that the device needs them."""
    tensor = values if isinstance(values, Tensor) else _tensor(values)
    tensor = tensor if dtype is None else tensor.type(dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensor(values: list[Any] | tuple[Any, ...] | NDArray[Any]) -> Tensor:
    """As `torch.as_tensor` makes it, which takes three times as long over a short list."""
    tensor = torch.from_numpy(np.asarray(values))
    is_of_floats = tensor.dtype == torch.float64 and not isinstance(values, np.ndarray)
    return tensor.float() if is_of_floats else tensor


class Wanted:
    """A tensor that has been asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._values: Any = None

    @property
    def values(self) -> Any:
        """Its numbers, as `tolist` has them, once the readback has been waited for."""
        assert self._values is not None, "nobody has waited for it yet"
        return self._values

    def arrive(self, on_host: Tensor) -> None:
        self._values = on_host.tolist()


class Readback:
    """Tensors that the host wants to see: any number of them for one wait. They are on one device."""

    def __init__(self) -> None:
        self._wanted: list[Wanted] = []

    def ask(self, tensor: Tensor) -> Wanted:
        """`tensor` must not be changed until it has arrived."""
        self._wanted.append(Wanted(tensor))
        return self._wanted[-1]

    def wait(self) -> None:
        """Have everything that was asked for brought here, in one copy if it is elsewhere."""
        if self._wanted and self._wanted[0].tensor.device.type != "cpu":
            _bring(self._wanted)
        else:
            for wanted in self._wanted:
                wanted.arrive(wanted.tensor)
        self._wanted.clear()


def _bring(everything: Sequence[Wanted]) -> None:
    """In one copy."""
    by_size = sorted(everything, key=lambda wanted: -wanted.tensor.itemsize)  # so that each begins at a multiple
    # A copy, for torch takes what has one element for contiguous, and then minds its strides.
    parts = [wanted.tensor.reshape(-1).clone(memory_format=torch.contiguous_format) for wanted in by_size]
    packed = torch.cat([part.view(torch.uint8) for part in parts]).cpu()
    first = 0
    for wanted in by_size:
        tensor = wanted.tensor
        end = first + prod(tensor.shape) * tensor.itemsize
        wanted.arrive(packed[first:end].view(tensor.dtype).view(tensor.shape))
        first = end
