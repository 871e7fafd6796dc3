"""Why a stream's decisions were made, as lines for people, where somebody has asked.

Knows shapes, chances, prices and times; must not know tokens. A session without a question has no `Explanation`, and
pays for nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MAX_LINES = 200
"""Of one stream; the last one says that there are no more."""


class Explanation:
    """The lines of one stream that have not gone to its client yet."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._lines: list[str] = []
        self._num_rounds = 0
        self._notes: list[str] = []
        """What the next round's line begins with."""
        self._open = ""
        """The line of the round whose verdict is awaited."""

    def take(self) -> tuple[str, ...]:
        """The lines since the last time."""
        lines, self._lines = self._lines, []
        return tuple(lines)

    def say(self, line: str) -> None:
        """One more, if there is room for it."""
        self._num_lines += 1
        if self._num_lines < MAX_LINES:
            self._lines.append(line)
        elif self._num_lines == MAX_LINES:
            self._lines.append(f"no more: {MAX_LINES} lines are explained of a stream")

    def note(self, text: str) -> None:
        """Something of the round that is being prepared; its line has each note once."""
        if text not in self._notes:
            self._notes.append(text)

    def waits(self, reason: str, timeout_s: float) -> None:
        """The round waits for the draft."""
        self.note(f"waited for the draft, at most {1e3 * timeout_s:.0f} ms: {reason}")

    def verifies(self, depth: int, sources: Sequence[str], reason: str) -> None:
        """The round's block, empty or not, goes to the target."""
        notes, self._notes = self._notes, []
        self._begin("; ".join([*notes, f"{_block(depth, sources)}: {reason}"]))

    def goes_on(self, depth: int, sources: Sequence[str]) -> None:
        """The target has gone on by itself with a block that it was offered."""
        self._begin(f"the target went on by itself, as offered, with {_block(depth, sources)}")

    def prefills(self, num_tokens: int) -> None:
        """A target that holds nothing of the text is sent all of it, with the block that was being verified."""
        self._open = self._open or f"prefill: a target takes in {num_tokens} tokens, and no guesses"

    def judged(self, num_guesses: int, num_accepted: int) -> None:
        """The verdict has come: the round's line is complete."""
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
