"""The rules of verification, a file each: what they ask for, and how they decide. The reference, in numpy."""

from core.rules.chains import NEGLIGIBLE_MASS
from core.rules.coupled import COUPLED, GREEDY
from core.rules.rule import Outcome, Rule, draw
from core.rules.table import Verification, all_rules, lossless

__all__ = ["COUPLED", "GREEDY", "NEGLIGIBLE_MASS", "Outcome", "Rule", "Verification", "all_rules", "draw", "lossless"]
