"""What a benchmark shows while it runs."""

from __future__ import annotations


def say(line: str) -> None:
    """Print a line of progress at once, also into a file or a pipe."""
    print(f"... {line}", flush=True)
