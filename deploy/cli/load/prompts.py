"""The requests of a run: prompts from a file in turn, or random token ids of given lengths; each with its own seed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.cli.load.records import LoadRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths from `low` to `high`, written "32-256"; or one length, written "64"."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises: ValueError."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high:
            raise ValueError(f"must be N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return cls(low, high)

    def draw(self, random: np.random.Generator) -> int:
        return int(random.integers(self.low, self.high + 1))

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Generates requests; the same seed gives the same requests."""

    texts: Sequence[str]
    """Prompts, used in turn; empty for random token ids."""
    prompt_tokens: Lengths
    vocab_size: int
    output_tokens: Lengths
    cancel_share: float
    """Share of the requests that are cancelled after a random part of their output."""
    seed: int

    def requests(self, num: int) -> Iterator[LoadRequest]:
        random = np.random.default_rng(self.seed)
        for index in range(num):
            yield self._request(index, random)

    def _request(self, index: int, random: np.random.Generator) -> LoadRequest:
        max_tokens = self.output_tokens.draw(random)
        is_cancelled = random.random() < self.cancel_share
        after = int(random.integers(1, max_tokens + 1))
        return LoadRequest(self._prompt(index, random), max_tokens, self.seed + index, after if is_cancelled else None)

    def _prompt(self, index: int, random: np.random.Generator) -> str | tuple[int, ...]:
        if self.texts:
            return self.texts[index % len(self.texts)]
        return tuple(random.integers(0, self.vocab_size, self.prompt_tokens.draw(random)).tolist())
