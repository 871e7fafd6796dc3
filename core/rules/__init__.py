"""Verification rules, one file each: what a rule needs, and how it decides. The numpy reference implementation."""

from core.rules.chains import NEGLIGIBLE_MASS
from core.rules.coupled import GREEDY
from core.rules.rule import Outcome, Rule, draw
from core.rules.table import Verification, all_rules, lossless
