"""A bound on what a schema's `multipleOf` costs, which the library's own limits do not see.

llguidance follows remainders digit by digit, and looks through all of them to see whether a number is left: a divisor
of 1,000,003 took 5 s and 330 MB, and one of 100,000,007 had not ended when it was killed. Divisors of one value are
merged to their least common multiple, so all of a text count together.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

MAX_DIVISOR = 20_000
"""Least common multiple of all divisors of a text, in units of the last decimal that any of them has: 0.1 s at most."""
MAX_EXPONENT = 30
"""Powers of ten of one number; the library takes no more digits than 15."""
_DIVISOR = re.compile(
    "".join(rf"(?:{each}|\\u00(?i:{ord(each):02x}))" for each in "multipleOf") + r'"\s*:\s*([-+0-9.eE]{1,64})'
)
"""In JSON, inside of a Lark grammar or by itself, its letters escaped or not."""


def problem_of_divisors(text: str) -> str | None:
    """Why a JSON schema, or a Lark grammar with some in it, would take too long; None where it does not."""
    divisors = {value for value in map(_value, _DIVISOR.findall(text)) if value}
    if any(abs(value.adjusted()) > MAX_EXPONENT for value in divisors):
        return f"a multipleOf has an exponent beyond {MAX_EXPONENT}"
    num_decimals = max((-_exponent(value) for value in divisors), default=0)
    units = [abs(int(value.scaleb(max(0, num_decimals)))) for value in divisors]
    common = math.lcm(*units)
    if common <= MAX_DIVISOR or _is_power_of_ten(common):
        return None
    return f"multipleOf is followed up to {MAX_DIVISOR} (all of the schema together), got {common}"


def _value(text: str) -> Decimal | None:
    """None for what is no number of the library's: it says so."""
    try:
        return Decimal(text).normalize()
    except ArithmeticError:
        return None


def _exponent(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), "it is finite"
    return exponent


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"
