"""The rules of the named policies: how many guesses in a row, and where a chain ends early.

Knows how sure the draft was at each place, and what was accepted; must not know tokens. A rule looks at what q was like
and never at what was drawn, so that it may be used where drafts sample, too (docs/exactness.md, section 4).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile

from core.config import SpeculationConfig
from core.records import Policy
from core.speculation import Measure

FIRST_GAMMA = 4
"""Where the heuristic begins."""


class Rule:
    """Always gamma guesses in a row."""

    measure = Measure.LEAD
    min_sureness = 0.0
    """The chain ends at a place where the draft is less sure than this by that measure,"""
    min_reach = 0.0
    """or before a guess that it reaches with less than this chance: the product of how sure it was on the way."""

    def __init__(self, max_depth: int, config: SpeculationConfig) -> None:  # noqa: ARG002  some have settings
        self._max_depth = max_depth

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.why}>"

    @property
    def gamma(self) -> int:
        """Guesses in a row at present."""
        return self._max_depth

    @property
    def why(self) -> str:
        """For people."""
        return f"always {self._max_depth}"

    def num_kept(self, sureness: Sequence[float]) -> int:
        """How many guesses of a chain to verify; `sureness`: of the place before each."""
        pairs = zip(sureness, accumulate(sureness, operator.mul), strict=True)
        return sum(1 for _ in takewhile(lambda at: at[0] >= self.min_sureness and at[1] >= self.min_reach, pairs))

    def saw(self, num_guesses: int, num_accepted: int) -> None:
        """What became of a chain."""


class HeuristicRule(Rule):
    """Two guesses more after a block that was accepted whole, one less otherwise. Source: transformers' schedule."""

    def __init__(self, max_depth: int, config: SpeculationConfig) -> None:
        super().__init__(max_depth, config)
        self._gamma = min(FIRST_GAMMA, max_depth)

    @property
    def gamma(self) -> int:
        return self._gamma

    @property
    def why(self) -> str:
        return f"to begin with; +2 after a block that was accepted whole, -1 otherwise, up to {self._max_depth}"

    def saw(self, num_guesses: int, num_accepted: int) -> None:
        self._gamma = max(1, min(self._gamma + (2 if num_accepted == num_guesses else -1), self._max_depth))


class ConfidenceRule(Rule):
    """While the first candidate's share is large enough."""

    measure = Measure.CONFIDENCE

    def __init__(self, max_depth: int, config: SpeculationConfig) -> None:
        super().__init__(max_depth, config)
        self.min_sureness = config.min_confidence

    @property
    def why(self) -> str:
        return f"while the largest probability of q is at least {self.min_sureness:g}"


class EntropyRule(Rule):
    """While the entropy of q is small enough."""

    measure = Measure.ENTROPY

    def __init__(self, max_depth: int, config: SpeculationConfig) -> None:
        super().__init__(max_depth, config)
        self._max_entropy = config.max_entropy
        self.min_sureness = math.exp(-config.max_entropy)

    @property
    def why(self) -> str:
        return f"while the entropy of q is at most {self._max_entropy:g} nats"


class PathRule(Rule):
    """While the text is likely enough to get there, by the draft's own chances."""

    def __init__(self, max_depth: int, config: SpeculationConfig) -> None:
        super().__init__(max_depth, config)
        self.min_reach = config.min_path_probability

    @property
    def why(self) -> str:
        return f"while the product of the draft's chances is at least {self.min_reach:g}"


RULES: Mapping[Policy, type[Rule]] = {
    "static": Rule,
    "static_tree": Rule,
    "heuristic": HeuristicRule,
    "confidence": ConfidenceRule,
    "path_probability": PathRule,
    "entropy": EntropyRule,
}
"""Of chains; "static_tree" has them where the draft samples."""
