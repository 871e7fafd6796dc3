"""The licence of a checkpoint, by the hub's short name, for the card of what is made from it."""

from __future__ import annotations

import re
from pathlib import Path

UNKNOWN = "unknown"
HEADER = re.compile(r"\A---\n(.*?)^---$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"^license:[ \t]*[\"']?(\w[\w.+-]*)", re.MULTILINE)
TEXTS = {"apache-2.0": re.compile(r"Apache License\s+Version 2\.0"), "mit": re.compile(r"\AMIT License")}


def license_of(checkpoint: Path) -> str:
    """From the header of its card, or else a LICENSE whose text is known here; else `UNKNOWN`."""
    header = HEADER.search(_text(checkpoint / "README.md"))
    if header is not None and (named := NAMED.search(header[1])) is not None:
        return named[1]
    text = "".join(_text(file) for file in sorted(checkpoint.glob("LICENSE*"))[:1]).strip()
    return next((name for name, pattern in TEXTS.items() if pattern.search(text)), UNKNOWN)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
