"""Memory for weights in huge pages: a pass reads all of them, and each small page would cost a look-up.

Knows memory; must not know weights.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
"""Memory is taken in stretches of at least this size."""
_ALIGNED: Final = 64


class Pages:
    """Stretches of memory, of which tensors take their parts; freed with the last of them."""

    def __init__(self) -> None:
        self._stretch = torch.zeros(0, dtype=torch.uint8)
        self._taken = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._taken + num_bytes > len(self._stretch):
            self._stretch, self._taken = _stretch(max(num_bytes, CHUNK_BYTES)), 0
        part = self._stretch[self._taken : self._taken + num_bytes].view(tensor.dtype).view(tensor.shape)
        self._taken += -(-num_bytes // _ALIGNED) * _ALIGNED
        return part.copy_(tensor)


def _stretch(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # not every system has huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
