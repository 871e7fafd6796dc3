"""Helpers of all programs here: where the server is, what they ask, and how checks are run.

A program is run in an environment that has its client and nothing of this project. The model writes nonsense, so that
checks are of the protocol: forced calls, schemas, events, usage.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any

URL = os.environ["SERVER_URL"]
"""Without /v1."""
KEY = os.environ["SERVER_KEY"]
MODEL = "outrider-demo"
CITIES = ("Oslo", "Rome")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [*CITIES]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""A schema whose outputs are all short and valid."""


def run(names: Mapping[str, Any]) -> None:
    """Run each function of the program whose name begins with check_, and say of each whether it held."""
    failed = 0
    for name, check in names.items():
        if not name.startswith("check_"):
            continue
        try:
            result = check()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print("held", name)
        except Exception:
            failed += 1
            print("FAILED", name)
            traceback.print_exc(file=sys.stdout)
    sys.exit(1 if failed else 0)
