"""Names for whole blocks of tokens: equal names mean equal tokens, in the block and in all before it.

One session reads the KV of another by these names, so they must resist a caller who chooses tokens to find a collision.
The quick hash of `core.text.token_log` compares one session with itself and would not do.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16


def block_hashes(tokens: Sequence[int], block_tokens: int, known: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """One name for each whole block of `tokens`; `known` are the names of its first blocks, if computed already."""
    hashes = list(known)
    for start in range(len(hashes) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        block = array("q", tokens[start : start + block_tokens])
        before = hashes[-1] if hashes else b""
        hashes.append(blake2b(block, digest_size=HASH_BYTES, key=before).digest())
    return hashes
