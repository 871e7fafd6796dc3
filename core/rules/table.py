"""The table of rules, by the names that requests give them."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from core.rules.chains import BLOCK, REJECTION
from core.rules.coupled import COUPLED
from core.rules.lenient import LENIENT_COUPLED
from core.rules.lenient_rejection import LENIENT_REJECTION
from core.rules.recursive_rejection import RECURSIVE_REJECTION
from core.rules.rule import Rule
from core.rules.sequential_selection import SEQUENTIAL_SELECTION
from core.rules.typical import TYPICAL


class Verification(StrEnum):
    """How a block is checked against the target (docs/exactness.md). A line is all that a rule needs in `core` beside
    its file (docs/howto/add-a-rule.md)."""

    _value_: str
    rule: Rule

    def __new__(cls, name: str, rule: Rule) -> Self:
        member = str.__new__(cls, name)
        member._value_, member.rule = name, rule
        return member

    COUPLED = "coupled", COUPLED
    REJECTION = "rejection", REJECTION
    BLOCK = "block", BLOCK
    LENIENT_COUPLED = "lenient_coupled", LENIENT_COUPLED
    LENIENT_REJECTION = "lenient_rejection", LENIENT_REJECTION
    TYPICAL = "typical", TYPICAL
    RECURSIVE_REJECTION = "recursive_rejection", RECURSIVE_REJECTION
    SEQUENTIAL_SELECTION = "sequential_selection", SEQUENTIAL_SELECTION

    def at(self, *, is_greedy: bool) -> Rule:
        """The rule that decides, by the sampling that it decides for."""
        return self.rule.at(is_greedy=is_greedy)


def all_rules() -> tuple[Rule, ...]:
    """Each rule that may decide, those of temperature 0 included, once."""
    return tuple(dict.fromkeys(each.at(is_greedy=is_greedy) for each in Verification for is_greedy in (False, True)))


def lossless(*, is_greedy: bool) -> tuple[Verification, ...]:
    """Names of the lossless rules that differ for this sampling; of names for one rule the first."""
    first: dict[Rule, Verification] = {}
    for each in Verification:
        if each.rule.is_lossless:
            first.setdefault(each.at(is_greedy=is_greedy), each)
    return tuple(first.values())
