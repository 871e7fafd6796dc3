"""The table of rules, by their names in requests."""

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
    """How a block is checked against the target (docs/exactness.md). A new rule needs its file and one line here
    (docs/howto/add-a-rule.md)."""

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
        """The rule to apply, for greedy decoding or for sampling."""
        return self.rule.at(is_greedy=is_greedy)


def all_rules() -> tuple[Rule, ...]:
    """Every rule that may be applied, including those of temperature 0, once each."""
    return tuple(dict.fromkeys(each.at(is_greedy=is_greedy) for each in Verification for is_greedy in (False, True)))


def lossless(*, is_greedy: bool) -> tuple[Verification, ...]:
    """Names of the distinct lossless rules for this sampling. If several names share a rule, the first one."""
    first: dict[Rule, Verification] = {}
    for each in Verification:
        if each.rule.is_lossless:
            first.setdefault(each.at(is_greedy=is_greedy), each)
    return tuple(first.values())
