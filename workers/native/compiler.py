"""Compiles functions by Numba, which keeps the code beside the module or in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(signature: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile when the module is imported, without the interpreter's lock.

    If the cache cannot be written or read, compile without it. The error model is numpy's, because checking each
    divisor for 0 would keep loops from being vectorized.
    """

    def compiled_one(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, nogil=True, error_model="numpy", cache=True, **options)(function)
        except Exception:  # noqa: BLE001  no cache folder, a full disk, a truncated file
            return numba.njit(signature, nogil=True, error_model="numpy", **options)(function)

    return compiled_one
