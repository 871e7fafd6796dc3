"""Limits the cost of a schema's `multipleOf`, which the library's own limits do not cover.

llguidance tracks remainders digit by digit, and searches all of them to see whether a number is left. A divisor of
1,000,003 took 5 s and 330 MB; one of 100,000,007 was killed before it ended. The library merges divisors of one value
to their least common multiple, so all divisors of a text count together.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

MAX_DIVISOR = 20_000
"""Limit on the least common multiple of a text's divisors, in units of the smallest decimal place of any of them.
Compiling takes 0.1 s at most."""
MAX_EXPONENT = 30
"""Limit on a number's power of ten. The library accepts at most 15 digits."""
_DIVISOR = re.compile(
    "".join(rf"(?:{each}|\\u00(?i:{ord(each):02x}))" for each in "multipleOf") + r'"\s*:\s*([-+0-9.eE]{1,64})'
)
"""Matches multipleOf in JSON, alone or inside a Lark grammar, with its letters escaped or not."""


def problem_of_divisors(text: str) -> str | None:
    """Why the divisors of a JSON schema or a Lark grammar would take too long; None if they do not."""
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
    """None if this is not a number, which the library reports itself."""
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
