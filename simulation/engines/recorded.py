"""Recorded agreement of a real pair: `bench.models.traces` records it, `TraceLaw` replays it.

Knows the file format; must not know the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.speculation import MAX_RANKS
from simulation.engines.texts import NEVER_RANKED, Agreement

DEMO_TRACES = Path(__file__).parents[1] / "traces" / "demo.npz"
"""Recording of the embedded demo pair: 40 held-out prompts, 160 tokens each, at three temperatures."""
RECORDED_TEMPERATURES = (0.0, 0.7, 1.0)
HEAD_TRACES = DEMO_TRACES.with_name("smollm2-head.npz")
"""Recording of SmolLM2-135M-Instruct and its head: 24 prompts, 160 tokens each, at two temperatures."""
HEAD_TEMPERATURES = (0.0, 0.8)
HEAD_DEPTHS = 10
"""Numbers of guesses since the last features for which a head's agreement is recorded, from 0."""
MAX_RANK = 255
"""Stored rank that stands for itself and all above."""
MAX_GAMMA = 8
"""Longest chain recorded for block verification."""
SHARE_RANKS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 15, 23, 31)
"""Ranks whose share relative to the first is stored. Shares between them are interpolated in log-log."""
SHARE_STEP = 1 / 16
"""Step of the logarithm of a stored share."""


_LOG_RANKS = np.log(np.arange(1, MAX_RANKS + 1))


class Column(StrEnum):
    """The stored values of each token."""

    RANK = "rank"
    PLAIN_RANK = "plain_rank"
    ALPHA = "alpha"
    CONFIDENCE = "confidence"
    PLAIN_CONFIDENCE = "plain_confidence"
    ENTROPY = "entropy"


COLUMNS = {
    Column.RANK: 1,
    Column.PLAIN_RANK: 1,
    Column.ALPHA: 255,
    Column.CONFIDENCE: 255,
    Column.PLAIN_CONFIDENCE: 255,
    Column.ENTROPY: 32,
}
"""Factor by which a value is multiplied to be stored in a byte."""


@dataclass(frozen=True, eq=False, slots=True)
class TraceLaw:
    """Text `seed` replays recording `seed`, followed by the next recordings."""

    columns: dict[Column, NDArray[np.uint8]]  # each [texts, tokens]
    blocks: NDArray[np.uint8] | None  # [texts, tokens, MAX_GAMMA]
    shares: NDArray[np.uint8]  # [texts, tokens, SHARE_RANKS], -log(share / the first's) / SHARE_STEP

    @classmethod
    def load(cls, temperature: float, path: Path = DEMO_TRACES, depth: int | None = None) -> TraceLaw:
        """`depth`: of a head's guesses. Raises: KeyError if nothing was recorded at this temperature."""
        traces, suffix = _read(path), f"{'' if depth is None else f'/{depth}'}@{temperature:g}"
        columns = {column: traces[f"{column}{suffix}"] for column in COLUMNS}
        return cls(columns, traces.get(f"blocks{suffix}"), traces[f"shares{suffix}"])

    @lru_cache(maxsize=1 << 16)  # noqa: B019  laws are few, and live as long as the program
    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:  # noqa: ARG002
        text, token = self._find(seed, index)
        values = {column: int(self.columns[column][text, token]) for column in COLUMNS}
        confidence = values[Column.CONFIDENCE] / COLUMNS[Column.CONFIDENCE]
        steps = np.interp(_LOG_RANKS, _LOG_RANKS[list(SHARE_RANKS)], self.shares[text, token])
        shares = confidence * np.exp(-SHARE_STEP * steps)
        return Agreement(
            rank=_rank(values[Column.RANK]),
            plain_rank=_rank(values[Column.PLAIN_RANK]),
            alpha=values[Column.ALPHA] / COLUMNS[Column.ALPHA],
            confidence=confidence,
            entropy=values[Column.ENTROPY] / COLUMNS[Column.ENTROPY],
            plain_confidence=values[Column.PLAIN_CONFIDENCE] / COLUMNS[Column.PLAIN_CONFIDENCE],
            shares=tuple(shares.tolist()),
        )

    def num_accepted_of_block(self, seed: int, index: int, num_guesses: int) -> int | None:
        """Number of accepted guesses; None for chains longer than `MAX_GAMMA` and for greedy decoding, which are not
        recorded."""
        if self.blocks is None or num_guesses > MAX_GAMMA:
            return None
        text, token = self._find(seed, index)
        return int(self.blocks[text, token, num_guesses - 1])

    def _find(self, seed: int, index: int) -> tuple[int, int]:
        num_texts, num_tokens = self.columns[Column.RANK].shape
        return (seed + index // num_tokens) % num_texts, index % num_tokens


@dataclass(frozen=True, eq=False, slots=True)
class HeadLaw:
    """Agreement of a head, which falls with the number of guesses since the last features of the target."""

    by_depth: tuple[TraceLaw, ...]
    """The last one stands for all greater depths."""

    @classmethod
    def load(cls, temperature: float, path: Path = HEAD_TRACES) -> HeadLaw:
        """Raises: KeyError if nothing was recorded at this temperature."""
        return cls(tuple(TraceLaw.load(temperature, path, depth) for depth in range(HEAD_DEPTHS)))

    def at(self, seed: int, index: int, depth: int = 0) -> Agreement:
        return self.by_depth[min(depth, len(self.by_depth) - 1)].at(seed, index)

    def num_accepted_of_block(self, _seed: int, _index: int, _num_guesses: int) -> int | None:
        return None


def _rank(value: int) -> int:
    return value if value < MAX_RANK else NEVER_RANKED


@cache
def _read(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)
