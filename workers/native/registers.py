"""Places of a row's registers. Knows codes; must not know operations."""

from __future__ import annotations

from typing import Any

from workers.native.compiler import compiled


@compiled("int64(int64[::1], int64, int64, int64, int64)")
def place(code: Any, column: int, base: int, count: int, row: int) -> Any:
    """Index of a row's first number: a register's place is (place in the row << 32) + place of the register."""
    return base + (code[column] & 0xFFFFFFFF) * count + row * code[column + 1] + (code[column] >> 32)
