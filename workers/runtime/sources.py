"""Sources of an encoder-decoder: the encoder's pass, and the KV that cross-attention reads.

Sequences share the KV of a source as they share any prefix. A source that ends inside a block shares all blocks but the
last, so the outputs of recent encoder passes are kept: each source is encoded once while it is in use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from workers.model import SourceDecoder
from workers.step import KVCache, StepRows

MAX_KEPT_TOKENS: Final = 16_384
"""Encoder outputs are kept for sources of this total length; the least recently used goes first. 64 MB for 1,024
dimensions in float32."""


class Sources:
    """Writes the KV of sources."""

    def __init__(self, decoder: SourceDecoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._encoded: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.num_passes = 0
        """Number of passes of the encoder."""

    def write(self, batch: Sequence[StepRows]) -> list[StepRows]:
        """Write the rows that belong to sources. Returns the other rows, without sequences that have none."""
        return [rest for item in batch if (rest := self._write(item)).num_rows]

    def _write(self, item: StepRows) -> StepRows:
        kv = item.kv
        count = min(kv.num_source - kv.num_tokens, len(item.tokens))
        if count <= 0:
            return item
        slots = self._cache.slots(kv, kv.num_tokens, kv.num_tokens + count)
        self._store(self._encode(item.source)[kv.num_tokens : kv.num_tokens + count], slots)
        self._cache.extend(kv, count)
        return replace(item, tokens=item.tokens[count:])

    def _store(self, encoded: Tensor, slots: Sequence[int]) -> None:
        targets = torch.tensor(slots, device=self._cache.device)
        for layer, keys, values in self._decoder.source_rows(encoded):
            self._cache.keys[layer].index_copy_(0, targets, keys)
            self._cache.values[layer].index_copy_(0, targets, values)

    def _encode(self, source: Sequence[int]) -> Tensor:
        key = tuple(source)
        if key not in self._encoded:
            self._encoded[key] = self._decoder.encode(source)
            self.num_passes += 1
        self._encoded.move_to_end(key)
        while len(self._encoded) > 1 and sum(map(len, self._encoded)) > MAX_KEPT_TOKENS:
            self._encoded.popitem(last=False)
        return self._encoded[key]
