"""Explains a stream's decisions in lines of text, if the client asks for it.

Knows shapes, probabilities, prices and times; must not know tokens. Other sessions have no `Explanation`, and no
overhead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MAX_LINES = 200
"""Maximum number of lines per stream. The last one says that no more follow."""


class Explanation:
    """The lines of one stream that have not been sent to its client yet."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._lines: list[str] = []
        self._num_rounds = 0
        self._notes: list[str] = []
        """Notes at the start of the next round's line."""
        self._open = ""
        """Line of the round whose verdict is awaited."""

    def take(self) -> tuple[str, ...]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return tuple(lines)

    def say(self, line: str) -> None:
        """Add a line, up to `MAX_LINES`."""
        self._num_lines += 1
        if self._num_lines < MAX_LINES:
            self._lines.append(line)
        elif self._num_lines == MAX_LINES:
            self._lines.append(f"no more: {MAX_LINES} lines are explained of a stream")

    def note(self, text: str) -> None:
        """Add a note to the next round's line, once."""
        if text not in self._notes:
            self._notes.append(text)

    def waits(self, reason: str, timeout_s: float) -> None:
        """Record that the round waits for the draft."""
        self.note(f"waited for the draft, at most {1e3 * timeout_s:.0f} ms: {reason}")

    def verifies(self, depth: int, sources: Sequence[str], reason: str) -> None:
        """Record that the round's block, possibly empty, is sent to the target."""
        notes, self._notes = self._notes, []
        self._begin("; ".join([*notes, f"{_block(depth, sources)}: {reason}"]))

    def goes_on(self, depth: int, sources: Sequence[str]) -> None:
        """Record that the target continued by itself with an offered block."""
        self._begin(f"the target went on by itself, as offered, with {_block(depth, sources)}")

    def prefills(self, num_tokens: int) -> None:
        """Record the prefill of a new target, which is sent the whole text and the block that was being verified."""
        self._open = self._open or f"prefill: a target takes in {num_tokens} tokens, and no guesses"

    def judged(self, num_guesses: int, num_accepted: int) -> None:
        """Complete the round's line with the verdict."""
        line, self._open = self._open, ""
        self.say(f"{line}; {num_accepted} accepted" if num_guesses else line)

    def _begin(self, text: str) -> None:
        self._num_rounds += 1
        self._open = f"round {self._num_rounds}: {text}"


def _block(depth: int, sources: Sequence[str]) -> str:
    if not sources:
        return "no guesses"
    by_source = ", ".join(f"{name} {number}" for name, number in sorted(Counter(sources).items()))
    return f"{len(sources)} {'guess' if len(sources) == 1 else 'guesses'}, {depth} deep ({by_source})"
