"""The rules of verification, a file each: what they ask for, and how they decide. The reference, in numpy."""

from core.rules.chains import NEGLIGIBLE_MASS
from core.rules.coupled import GREEDY
from core.rules.rule import Outcome, Rule, draw
from core.rules.table import Verification, all_rules, lossless
