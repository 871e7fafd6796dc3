"""How far verdicts go down what is drafted in turn.

Knows depths and chances; must not know tokens, costs or decisions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from core.speculation import Calibration, Floats


@dataclass(slots=True)
class Reach:
    """By depth, the chance of one more guess behind those that were accepted.

    It rises with the depth, since texts are easy and hard in stretches, and it is higher in a tree, which has more than
    one guess at a depth. So it is learned as what is to be added, in log odds, to the chance of the draft's first
    candidate, which follows a text as it changes.
    """

    steps: defaultdict[int, Calibration] = field(default_factory=lambda: defaultdict(Calibration))

    def path_prob(self, depth: int, first_chance: float) -> Floats:
        """The chance that a verdict goes so far, for each depth from 1.  # [depth]"""
        steps = [self.steps[step].chance(first_chance) for step in range(1, depth + 1)]
        return np.cumprod(np.array(steps))

    def observe(self, num_accepted: int, num_passes: int, first_chance: float) -> None:
        """One verdict on what `num_passes` have drafted, a number that was fixed before."""
        for step in range(1, min(num_passes, num_accepted + 1) + 1):
            self.steps[step].observe(first_chance, num_accepted >= step)
