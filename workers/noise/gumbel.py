"""Gumbel noise by key on any device, with the same bits as `core.noise`.

Knows keys and torch; must not know what the noise is used for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from core import noise
from core.noise import Key
from workers.noise import cpu_noise
from workers.noise.noise_self_test import find_noise_kernel
from workers.step import Uploads

FRESH_NUMBERS = 1 << 23
"""Limit on the numbers of noise that a GPU computes at a time: each takes 92 bytes of intermediate results."""


def gumbel_rows(keys: Sequence[Key], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise [R, V] of each key, with the bits of `core.noise.gumbel_rows`. Recent rows come from a cache."""
    uploads = Uploads(device)
    rows = prepare_gumbel_rows(keys, vocab_size, uploads)
    uploads.send()
    return rows()


def prepare_gumbel_rows(keys: Sequence[Key], vocab_size: int, uploads: Uploads) -> Callable[[], Tensor]:
    """`gumbel_rows` as a function to call after the upload."""
    unique = list(dict.fromkeys(keys))
    make = _maker(unique, vocab_size, uploads)
    if len(unique) == len(keys):
        return lambda: _NOISE.rows(unique, vocab_size, uploads.device, make)
    places = {key: place for place, key in enumerate(unique)}
    index = uploads.add([places[key] for key in keys])
    return lambda: _NOISE.rows(unique, vocab_size, uploads.device, make)[index()]


def gumbel_at(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of each key's row at these ids only, for draws from few tokens.  # keys [R, 4], ids [R, M] -> [R, M]"""
    columns = keys[:, :, None].unbind(dim=1)
    words = torch.stack(noise.words(token_ids // 4, *columns), dim=-1)
    bits = words.gather(2, (token_ids % 4)[:, :, None]).squeeze(2)
    gumbel: Tensor = noise.gumbel_of(bits.double(), _frexp)
    return gumbel.float()


Maker: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Computes the noise of the keys at these indices of a list."""


class NoiseCache:
    """A least-recently-used cache of noise rows. Thread-safe.

    A draft needs the rows of a position in every pass until the position is committed, and computing a row costs more
    than a pass of a small model.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[tuple[Key, int, torch.device], Tensor] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def rows(self, keys: Sequence[Key], vocab_size: int, device: torch.device, make: Maker) -> Tensor:
        """Noise [R, V] of distinct keys."""
        with self._lock:
            names = [(key, vocab_size, device) for key in keys]
            missing = [place for place, name in enumerate(names) if name not in self._rows]
            if missing:
                fresh = make(missing)
                self._rows.update(zip([names[place] for place in missing], fresh.unbind(), strict=True))
                self._num_bytes += fresh.nbytes
            for name in names:
                self._rows.move_to_end(name)
            found = torch.stack([self._rows[name] for name in names])
            while self._num_bytes > self._max_bytes:
                _, row = self._rows.popitem(last=False)
                self._num_bytes -= row.nbytes
            return found


_NOISE = NoiseCache(max_bytes=1 << 26)


def _maker(keys: Sequence[Key], vocab_size: int, uploads: Uploads) -> Maker:
    """Function that computes the noise of some of these keys.

    Uploads all keys to a GPU: which of them the cache lacks is known only when the noise is needed.
    """
    if uploads.device.type == "cpu":
        return lambda places: torch.from_numpy(cpu_noise.gumbel_rows([keys[place] for place in places], vocab_size))
    there = uploads.add(list(keys))

    def make(places: Sequence[int]) -> Tensor:
        wanted = there() if len(places) == len(keys) else torch.cat([there()[place : place + 1] for place in places])
        return _gumbel_on_gpu(wanted, vocab_size)

    return make


def _gumbel_on_gpu(keys: Tensor, vocab_size: int) -> Tensor:
    """Compute noise by the kernel if it has passed its self-test, else by torch's operators."""
    kernel = find_noise_kernel(keys.device)
    return kernel(keys, vocab_size) if kernel else _gumbel_in_parts(keys, vocab_size)


def _gumbel_in_parts(keys: Tensor, vocab_size: int) -> Tensor:
    """Compute noise in parts, so that intermediate results take a bounded part of a GPU's memory."""
    most = max(1, FRESH_NUMBERS // vocab_size)
    parts = [_gumbel_on_device(keys[first : first + most], vocab_size) for first in range(0, len(keys), most)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gumbel_on_device(keys: Tensor, vocab_size: int) -> Tensor:
    """Compute noise by torch's operators. Must not be compiled: a fused multiply-add would change the last bit."""
    blocks = torch.arange(-(-vocab_size // 4), device=keys.device)
    bits = torch.stack(noise.words(blocks, *keys[:, :, None].unbind(dim=1)), dim=-1)
    gumbel: Tensor = noise.gumbel_of(bits.flatten(1).double(), _frexp)
    return gumbel.float()[:, :vocab_size]


def _frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    mantissa, exponent = torch.frexp(x)
    return mantissa, exponent.double()
