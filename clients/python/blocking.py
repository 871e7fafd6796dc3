"""Generates the blocking client from the asyncio one; `--check` fails when the two disagree. Needs ruff."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "outrider_client"
SOURCE, GENERATED = PACKAGE / "aio.py", PACKAGE / "client.py"
WAITING = "Waiting for a chunk may be cancelled, by a timeout for example, and begun again: nothing is lost by that."
TEXTS = {
    '"""The client for asyncio. `clients/python/blocking.py` generates the blocking one from this file."""': (
        '"""The blocking client, generated from `aio.py`: change that, and run `python clients/python/blocking.py`."""'
    ),
    "import aio as io": "import blocking as io",
    "Use it as an async context manager": "Use it as a context manager",
    "Belongs to the event loop that it is first used in.": "May be shared by threads.",
    "An asynchronous iterator": "An iterator",
    "Any task may do so": "Any thread may do so",
    f"\n    {WAITING}\n": "",
    "[chunk async for chunk in stream]": "list(stream)",
    "StopAsyncIteration": "StopIteration",
}
PATTERNS = {
    r"\basync (?=def|with|for)": "",
    r"\bawait ": "",
    r"\bAsync(?=[A-Z])": "",
    r"\b__a(?=(enter|exit|next)__)": "__",
}


def blocking(code: str) -> str:
    """The blocking form of `code`. Raises: ValueError if `code` lacks one of TEXTS."""
    for text, other in TEXTS.items():
        if text not in code:
            raise ValueError(f"{SOURCE.name} has no {text!r}: change TEXTS in {Path(__file__).name}")
        code = code.replace(text, other)
    for pattern, other in PATTERNS.items():
        code = re.sub(pattern, other, code)
    for command in (("check", "--fix", "--exit-zero", "--select", "I"), ("format",)):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(GENERATED), "-"]
        code = subprocess.run(ruff, input=code, capture_output=True, text=True, check=True).stdout  # noqa: S603
    return code


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    code = blocking(SOURCE.read_text())
    if "--check" not in argv:
        GENERATED.write_text(code)
    elif code != GENERATED.read_text():
        sys.stderr.write(f"{GENERATED} is not what {SOURCE.name} gives: run python {__file__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
