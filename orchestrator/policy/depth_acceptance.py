"""Accepted depth of blocks drafted in turn.

Knows depths and probabilities; must not know tokens, costs or decisions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from core.speculation import Calibration, Floats


@dataclass(slots=True)
class DepthAcceptance:
    """Chance, by depth, of one more accepted guess after the accepted ones.

    The chance rises with depth, since texts are easy and hard in stretches, and is higher in a tree, which has more
    than one guess at a depth. It is therefore learned as an offset, in log odds, to the chance of the draft's first
    candidate, which adapts to the text.
    """

    steps: defaultdict[int, Calibration] = field(default_factory=lambda: defaultdict(Calibration))

    def path_prob(self, depth: int, first_chance: float) -> Floats:
        """Return the probability that a verdict reaches each depth from 1.  # [depth]"""
        steps = [self.steps[step].chance(first_chance) for step in range(1, depth + 1)]
        return np.cumprod(np.array(steps))

    def observe(self, num_accepted: int, num_passes: int, first_chance: float) -> None:
        """Record a verdict on the guesses of `num_passes` draft passes, a number fixed beforehand."""
        for step in range(1, min(num_passes, num_accepted + 1) + 1):
            self.steps[step].observe(first_chance, num_accepted >= step)
