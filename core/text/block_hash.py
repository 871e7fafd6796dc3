"""Hashes that name whole blocks of tokens. Equal names mean equal tokens, in the block and in all blocks before it.

One session reads the KV of another by these names, so they must resist callers who choose tokens to force a collision.
The fast hash of `core.text.token_log` compares a session only with itself and is not safe here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes
HASH_BYTES = 16


def block_hashes(
    tokens: Sequence[int], block_tokens: int, known: Sequence[BlockHash] = (), root: bytes = b""
) -> list[BlockHash]:
    """Return one name per whole block of `tokens`. `known` are the names of the first blocks, if already computed.

    `root`: names of different roots differ. It stands for the weights, where they are not the model's own, and for
    the source of an encoder-decoder.
    """
    hashes = list(known)
    for start in range(len(hashes) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        before = hashes[-1] if hashes else root
        hashes.append(hash_of(tokens[start : start + block_tokens], before))
    return hashes


def hash_of(tokens: Sequence[int], before: bytes) -> BlockHash:
    """Name of these tokens after what `before` names."""
    return blake2b(array("q", tokens), digest_size=HASH_BYTES, key=before).digest()
