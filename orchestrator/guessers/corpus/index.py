"""A corpus as a memory-mapped suffix array over its token ids: built by `outrider index`, searched by `retrieval`.

Knows token ids and one file; must not know sessions. File format, all numbers of four bytes:

    magic (8 bytes), length of the header, header (JSON)
    tokens   N, big-endian, so that byte order is the order of the ids
    order    N, little-endian: start of each suffix, sorted by their first `SORTED_TOKENS` tokens
    starts   V + 2, little-endian: for each id, index in `order` of the first suffix that begins with it

Documents end with V, an id that no token has. Source of retrieval for guesses: REST (He et al. 2023, arXiv 2311.08252).
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.errors import ConfigError
from core.speculation import NO_Q, SparseDistribution

MAGIC = b"OUTRIDX1"
SORTED_TOKENS = 32
"""Number of tokens by which suffixes are sorted; also the longest ending that can be found."""
MAX_TOKENS = 2**31
MAX_COUNTED = 4096
"""Maximum number of occurrences counted for a distribution. If there are more, evenly spaced ones are counted, which
keeps the shares."""
MAX_COUNTED_TOKENS, MAX_DISTRIBUTIONS = 256, 1024
"""Maximum tokens per distribution, and maximum distributions cached: about 25 MB at most."""
LENGTH = struct.Struct("<I")
LITTLE_ENDIAN, BIG_ENDIAN = np.dtype("<u4"), np.dtype(">u4")
REBUILD_ADVICE = "build it again with `outrider index`"


@dataclass(frozen=True, slots=True)
class Header:
    """Header of an index file."""

    num_tokens: int
    vocab_size: int
    vocabulary: str
    """`Tokenizer.vocabulary_hash` of the tokenizer that produced the ids."""
    checksum: int
    """CRC-32 of the rest of the file."""


class CorpusIndex:
    """An open index, validated, and built for this vocabulary."""

    def __init__(self, header: Header, body: memoryview | bytes) -> None:
        body = memoryview(body)
        num, self.num_tokens = 4 * header.num_tokens, header.num_tokens
        self._tokens = body[:num]
        self._order = body[num : 2 * num].cast("I")
        self._starts = body[2 * num :].cast("I")
        self._end_of_document = header.vocab_size
        self.distribution_after = lru_cache(MAX_DISTRIBUTIONS)(self._distribution_after)
        """`_distribution_after` with a cache of its latest results, so that a process computes most of them once."""

    @classmethod
    def open(cls, path: Path, vocabulary: str) -> CorpusIndex:
        """Open an index, reading the whole file once into the page cache: lookups must not wait for a disk.

        Raises: ConfigError if the file cannot be read, is damaged, or was built for another vocabulary.
        """
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            header, body = _split_header(data)
        except (OSError, ValueError, TypeError, struct.error) as error:
            raise ConfigError(f"speculation.retrieval_index: {path} is no index: {error}; {REBUILD_ADVICE}") from error
        if header.vocabulary != vocabulary:
            problem = "was made with another tokenizer than the target's, so its ids mean other tokens"
            raise ConfigError(f"speculation.retrieval_index: {path} {problem}; {REBUILD_ADVICE} --tokenizer TARGET")
        return cls(header, body)

    def find(self, ending: Sequence[int], min_match: int) -> tuple[int, range]:
        """Find the longest suffix of `ending` in the corpus, at least `min_match` tokens long.

        Return its length and the range of corpus suffixes that begin with it; length 0 if there is none.
        """
        match, found, least, most = 0, range(0), min_match, min(len(ending), SORTED_TOKENS)
        while least <= most:  # longer endings occur only where shorter ones do
            length = (least + most) // 2
            indices = self._beginning_with(ending[len(ending) - length :])
            if indices:
                match, found, least = length, indices, length + 1
            else:
                most = length - 1
        return match, found

    def _distribution_after(self, context: Sequence[int], most_tokens: int) -> SparseDistribution:
        """Return the distribution of the token after `context`, or of any token if it is empty.

        It has the `most_tokens` likeliest tokens, at most `MAX_COUNTED_TOKENS`.
        """
        indices = self._beginning_with(context) if context else range(self.num_tokens)
        num = min(len(indices), MAX_COUNTED)
        chosen = indices[0] + (2 * np.arange(num) + 1) * len(indices) // (2 * num) if num else np.zeros(0, np.int64)
        order, tokens = np.frombuffer(self._order, LITTLE_ENDIAN), np.frombuffer(self._tokens, BIG_ENDIAN)
        found, counts = np.unique(tokens[order[chosen].astype(np.int64) + len(context)], return_counts=True)
        shares = dict(zip(found.tolist(), counts.tolist(), strict=True))
        shares.pop(self._end_of_document, None)
        return SparseDistribution.of_counts(shares, min(most_tokens, MAX_COUNTED_TOKENS)) if shares else NO_Q

    def _beginning_with(self, tokens: Sequence[int]) -> range:
        if not 0 <= tokens[0] < self._end_of_document:
            return range(0)
        key = struct.pack(f">{len(tokens)}I", *tokens)
        low, high = self._starts[tokens[0]], self._starts[tokens[0] + 1]
        first = self._bound(low, high, key)
        if first == high or self._prefix(first, len(key)) != key:
            return range(0)
        return range(first, self._bound(first, high, key + b"\xff\xff\xff\xff"))

    def _bound(self, low: int, high: int, key: bytes) -> int:
        """Return the first index in the order whose suffix is not less than `key`."""
        order, tokens, size = self._order, self._tokens, len(key)
        while low < high:
            middle = (low + high) // 2
            start = 4 * order[middle]
            if tokens[start : start + size].tobytes() < key:
                low = middle + 1
            else:
                high = middle
        return low

    def _prefix(self, index: int, num_bytes: int) -> bytes:
        start = 4 * self._order[index]
        return self._tokens[start : start + num_bytes].tobytes()

    def tokens_after(self, index: int, match: int, num: int) -> list[int]:
        """Return the tokens after the first `match` tokens of a suffix, up to the end of its document."""
        found = list(struct.iter_unpack(">I", self._prefix_after(index, match, num)))
        tokens = [token for (token,) in found]
        end = self._end_of_document
        return tokens[: tokens.index(end)] if end in tokens else tokens

    def _prefix_after(self, index: int, match: int, num: int) -> bytes:
        start = 4 * (self._order[index] + match)
        return self._tokens[start : start + 4 * num].tobytes()


def _split_header(data: memoryview) -> tuple[Header, memoryview]:
    """Split a file into header and body.

    Raises: ValueError, TypeError, struct.error if the file is no complete index.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError("it does not begin as one")
    begin = len(MAGIC) + LENGTH.size
    (size,) = LENGTH.unpack(data[len(MAGIC) : begin])
    header = Header(**json.loads(bytes(data[begin : begin + size])))
    body = data[begin + size :]
    if len(body) != 4 * (2 * header.num_tokens + header.vocab_size + 2):
        raise ValueError("it is not as long as it says")
    if zlib.crc32(body) != header.checksum:
        raise ValueError("its checksum is wrong")
    return header, body


def encode_index(
    documents: Iterable[Sequence[int]],
    *,
    vocab_size: int,
    vocabulary: str,
    observe_pass: Callable[[], None] = lambda: None,
) -> tuple[Header, bytes]:
    """Build an index: sort the suffixes of all documents. `observe_pass` is called after each of `NUM_PASSES` passes.

    Raises: ValueError if there is nothing to index, or too much.
    """
    parts = [np.asarray([*document, vocab_size], np.int64) for document in documents]
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not 0 < len(tokens) < MAX_TOKENS:
        raise ValueError(f"{len(tokens)} tokens, where 1 to {MAX_TOKENS - 1} can be indexed")
    order = suffix_order(tokens, observe_pass)
    starts = np.searchsorted(tokens[order], np.arange(vocab_size + 2))
    body = (
        tokens.astype(BIG_ENDIAN).tobytes()
        + order.astype(LITTLE_ENDIAN).tobytes()
        + starts.astype(LITTLE_ENDIAN).tobytes()
    )
    return Header(len(tokens), vocab_size, vocabulary, zlib.crc32(body)), body


def write_index(header: Header, body: bytes, path: Path) -> None:
    """Write an index file. Raises: OSError."""
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(len(MAGIC) + LENGTH.size + len(text)) % 8)
    path.write_bytes(MAGIC + LENGTH.pack(len(text)) + text + body)


NUM_PASSES = SORTED_TOKENS.bit_length()


def suffix_order(tokens: NDArray[np.int64], observe_pass: Callable[[], None] = lambda: None) -> NDArray[np.int64]:
    """Return the starts of all suffixes, sorted by their first `SORTED_TOKENS` tokens; a shorter one comes first.

    Prefix doubling: suffixes sorted by n tokens are sorted by 2n with their rank and the rank n tokens later.
    Source: Manber, Myers 1990.
    """
    rank, width = tokens, 1
    order = np.argsort(rank, kind="stable")
    observe_pass()
    while width < SORTED_TOKENS:
        later = np.concatenate([rank[width:] + 1, np.zeros(min(width, len(rank)), np.int64)])[: len(rank)]
        key = rank * (int(rank.max()) + 2) + later
        order = np.argsort(key, kind="stable")
        ranked = key[order]
        rank = np.empty_like(order)
        rank[order] = np.concatenate([[0], np.cumsum(ranked[1:] != ranked[:-1])])
        width *= 2
        observe_pass()
    return order
