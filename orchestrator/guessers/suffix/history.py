"""Recent outputs of one caller or tenant, indexed like a session's text, in bounded memory.

Past outputs of an isolation domain affect the speed of its later outputs, so a history is never used for another domain
(docs/guessers.md). Knows names of domains and tokens; must not know sessions.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import chain

from orchestrator.guessers.suffix.suffix_array import MAX_MATCH, MIN_MATCH, SuffixArray

SEPARATOR = -1
"""Separator before and after each output. No text has this token, so no match and no continuation extends over it."""
NUM_PARTS = 2
"""Number of parts of a history. The newer part grows; the older one is dropped as a whole."""
MAX_INDEXED_PER_LOOKUP = 256
"""Maximum number of recent output tokens indexed per look-up. Each blocks all streams for about 3 microseconds."""


class _Part:
    """Several outputs in one array."""

    def __init__(self) -> None:
        self.text = array("i", [SEPARATOR] * MIN_MATCH)
        self._array = SuffixArray()
        self._end = MIN_MATCH
        """End of the indexed positions."""

    def add(self, tokens: Sequence[int]) -> None:
        self.text.extend(tokens)
        self.text.append(SEPARATOR)

    def index(self, max_positions: int) -> int:
        """Index at most `max_positions` more positions. Return their number."""
        first, self._end = self._end, min(self._end + max_positions, len(self.text))
        self._array.add(self.text, filter(self._is_inside, range(first, self._end)))
        return self._end - first

    def _is_inside(self, end: int) -> bool:
        """Whether the tokens around this position belong to one output."""
        return SEPARATOR not in self.text[end - MIN_MATCH : end + 1]

    def continuations(self, ending: Sequence[int], max_matches: int, max_depth: int) -> Iterator[tuple[int, list[int]]]:
        for end, match in self._array.nearest(self.text, ending, max_matches):
            tokens = self.text[end : end + max_depth].tolist()
            yield match, tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


class History:
    """The latest outputs of one domain. A full history has between half of `max_tokens` tokens and all of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_part_tokens = max_tokens // NUM_PARTS
        self._parts = deque([_Part()], maxlen=NUM_PARTS)

    def __len__(self) -> int:
        return sum(len(part.text) for part in self._parts)

    def add(self, text: Sequence[int], prompt_len: int) -> None:
        """Add an output, with the end of its prompt, which is needed to find the output's beginning."""
        max_tokens = self._max_part_tokens - MIN_MATCH - 1
        first = max(prompt_len - MAX_MATCH, len(text) - max_tokens, 0)
        if len(text) <= prompt_len or max_tokens <= 0:
            return
        tokens = text[first:]
        if len(self._parts[-1].text) + len(tokens) + 1 > self._max_part_tokens:
            self._parts.append(_Part())
        self._parts[-1].add(tokens)

    def continuations(self, ending: Sequence[int], max_matches: int, max_depth: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the length of each match and the tokens that followed it, the longest matches first in each part."""
        left = MAX_INDEXED_PER_LOOKUP
        for part in reversed(self._parts):
            left -= part.index(left)
        return chain.from_iterable(part.continuations(ending, max_matches, max_depth) for part in reversed(self._parts))


class Histories:
    """The histories of all domains. The least recently used ones are dropped."""

    def __init__(self, max_tokens: int = 0, max_domains: int = 1) -> None:
        """`max_tokens`: maximum per history; 0 disables histories."""
        self._max_tokens = max_tokens
        self._max_domains = max_domains
        self._by_domain: OrderedDict[str, History] = OrderedDict()

    def of(self, domain: str) -> History | None:
        """Return the history of a domain; None if the domain has no name or histories are disabled."""
        if not domain or not self._max_tokens:
            return None
        history = self._by_domain.pop(domain, None)
        self._by_domain[domain] = history = History(self._max_tokens) if history is None else history
        if len(self._by_domain) > self._max_domains:
            self._by_domain.popitem(last=False)
        return history
