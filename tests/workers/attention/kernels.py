"""A kernel in plain loops that stands for the GPU's: row by row, head by head, and strict about what it is given."""

from __future__ import annotations

import torch


class PlainKernel:
    """Takes the place of `workers.attention.paged.Kernel`, and refuses what the real one computes wrongly."""

    def __init__(self):
        self.calls = []

    def causal(self, query, keys, values, reads, scale, window):
        self.calls.append("causal")
        return self._run(query, keys, values, reads, scale, lambda length, left: (length - left, window))[0]

    def unmasked(self, query, keys, values, reads, scale):
        self.calls.append("unmasked")
        return self._run(query, keys, values, reads, scale, lambda length, left: (length, None))

    def _run(self, query, keys, values, reads, scale, sees):
        assert reads.starts.dtype == reads.lengths.dtype == reads.table.dtype == torch.int32
        starts, lengths = reads.starts.tolist(), reads.lengths.tolist()
        assert starts[0] == 0
        assert starts[-1] == len(query), "rows that belong to no segment are never written"
        output = torch.full_like(query, torch.nan)
        logarithms = torch.full(query.shape[:2], torch.nan)
        heads_per_kv_head = query.shape[1] // keys.shape[2]
        for segment, length in enumerate(lengths):
            rows = range(starts[segment], starts[segment + 1])
            assert len(rows) <= reads.longest
            assert length >= 1, "a segment that sees nothing makes the kernel write in a wrong place"
            assert length <= reads.table.shape[1] * keys.shape[1]
            pages = reads.table[segment].long()
            k, v = keys[pages].flatten(0, 1), values[pages].flatten(0, 1)  # [W * block_tokens, H_kv, D]
            for row in rows:
                end, window = sees(length, rows.stop - 1 - row)
                assert end >= 1, "and so does a row"
                first = 0 if window is None else max(0, end - window)
                for head in range(query.shape[1]):
                    scores = k[first:end, head // heads_per_kv_head].float() @ query[row, head].float() * scale
                    seen = torch.softmax(scores, 0) @ v[first:end, head // heads_per_kv_head].float()
                    output[row, head] = seen.to(query.dtype)
                    logarithms[row, head] = torch.logsumexp(scores, 0)
        return output, logarithms
