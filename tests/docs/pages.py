"""The code that a page of docs/ has."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[str]:
    """In their order; indented ones from the margin on."""
    return [dedent(code) for code in BLOCK.findall((DOCS / page).read_text())]
