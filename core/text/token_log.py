"""A growing token sequence with a hash of each prefix.

Both ends of a lease keep one. Equal length and equal hash mean equal tokens, so a message only needs to name its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.records import Base

_MODULUS = 2**61 - 1
_MULTIPLIER = 0x1F3D5B79A2C4E681
EMPTY_HASH = 0x0DDB1A5E5BAD5EED


def extended(prefix_hash: int, token: int) -> int:
    """Return the hash of a prefix extended by `token`."""
    return (prefix_hash * _MULTIPLIER + token + 1) % _MODULUS


class TokenLog:
    """Tokens with a polynomial hash (modulo the Mersenne prime 2^61 - 1) of every prefix.

    Invariant: `len(hashes) == len(tokens) + 1`, and `hashes[n]` depends on the first n tokens alone.
    """

    __slots__ = ("_hashes", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._hashes: list[int] = [EMPTY_HASH]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"TokenLog({len(self)} tokens, hash {self._hashes[-1]:#x})"

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            self._hashes.append(extended(self._hashes[-1], token))

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens."""
        del self._tokens[num_tokens:]
        del self._hashes[num_tokens + 1 :]

    def base(self, num_tokens: int) -> Base:
        """Name the first `num_tokens` tokens by length and hash."""
        return Base(num_tokens, self._hashes[num_tokens])

    def holds(self, base: Base) -> bool:
        """Whether this log starts with exactly the prefix that `base` names."""
        return base.num_tokens <= len(self) and self._hashes[base.num_tokens] == base.prefix_hash

    def since(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._tokens[num_tokens:])

    def common_prefix_len(self, start: int, tokens: Sequence[int]) -> int:
        """Number of `tokens` that equal this log's tokens from position `start` on, up to the first difference."""
        held = self._tokens[start : start + len(tokens)]
        for index, (ours, theirs) in enumerate(zip(held, tokens, strict=False)):
            if ours != theirs:
                return index
        return min(len(held), len(tokens))
