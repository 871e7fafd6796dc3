"""A kernel in plain loops that stands for the GPU's: row by row, head by head, and strict about what it is given."""

from __future__ import annotations

import torch

from workers.step.kv_dtype import as_bits, as_stored


class PlainKernel:
    """Takes the place of `workers.attention.triton_attention.TritonKernel`."""

    def store(self, keys, values, key, value, slots):
        assert slots.dtype == torch.int32
        for pool, rows in ((keys, key), (values, value)):
            as_bits(pool)[slots.long()] = as_bits(as_stored(rows[0].transpose(0, 1), pool.dtype))

    def attend(self, query, keys, values, reads, kind):
        assert {each.dtype for each in (reads.tiles, reads.seen, reads.masks, reads.table)} == {torch.int32}
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        output = torch.full((*query.shape[:2], values.shape[2]), torch.nan, dtype=query.dtype)
        for first, count, sequence, end in reads.tiles[: int(reads.num_tiles)].tolist():
            assert count <= reads.tile_rows
            slots = self._slots(reads, sequence, end)
            for row in range(first, first + count):
                index = self._visible(reads, row, end, kind.window)
                for head in range(query.shape[1]):
                    kv_head = head * keys.shape[1] // query.shape[1]
                    k, v = keys[slots[index], kv_head].float(), values[slots[index], kv_head].float()
                    output[row, head] = self._one(query[row, head].float(), k, v, head, kind).to(query.dtype)
        return output

    def _slots(self, reads, sequence, end):
        rows = torch.arange(end)
        blocks = reads.table[sequence].long()[rows // reads.block_tokens]
        return blocks * reads.block_tokens + rows % reads.block_tokens

    def _visible(self, reads, row, end, window):
        """The rows of KV that this row sees."""
        seen, position = int(reads.seen[row]), int(reads.positions[row])
        assert seen <= end
        first = 0 if window is None else max(0, position - window + 1)
        bits = [(int(word) >> bit) & 1 for word in reads.masks[row].tolist() for bit in range(32)]
        nodes = [seen + node for node, is_seen in enumerate(bits) if is_seen]
        assert all(node < end for node in nodes)
        return [*range(first, seen), *nodes]

    def _one(self, query, keys, values, head, kind):
        scores = keys @ query * kind.scale
        if kind.softcap is not None:
            scores = torch.tanh(scores / kind.softcap) * kind.softcap
        sinks = scores.new_empty(0) if kind.sinks is None else kind.sinks[head : head + 1].float()
        weights = torch.softmax(torch.cat([scores, sinks]), 0)[: len(scores)]
        return weights @ values
